"""The frame of report.html: its style sheet, its few lines of script, and the page around parts."""

from html import escape

STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--panel:#fff;--ink:#1d1e20;--soft:#6b6d70;
--rule:#e4e1da;--c1:#2a66a8;--c2:#c76a2a;--c3:#2f8f7d;--c4:#8064a8;--c5:#b3afa6;--c6:#b23a48;
--on1:#fff;--on5:#3c3a36;--good:#2b7d5b;--warn:#a86a12;--bad:#b23a48;
--serif:"Iowan Old Style",Charter,"Palatino Linotype",Palatino,Georgia,"Noto Serif",serif;
--sans:system-ui,-apple-system,"Segoe UI","Helvetica Neue",Arial,sans-serif;
--mono:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media(prefers-color-scheme:dark){:root:not([data-theme=light]){--paper:#15171a;--panel:#1b1e22;
--ink:#e9e6e0;--soft:#9c9d9f;--rule:#2e3237;--c1:#6fa8e0;--c2:#e2945a;--c3:#58b8a4;--c4:#ab95d6;
--c5:#5d6066;--c6:#e0707c;--on1:#10151b;--on5:#e9e6e0;--good:#62c29a;--warn:#d9a24e;--bad:#e0707c}
}
:root[data-theme=dark]{--paper:#15171a;--panel:#1b1e22;--ink:#e9e6e0;--soft:#9c9d9f;
--rule:#2e3237;
--c1:#6fa8e0;--c2:#e2945a;--c3:#58b8a4;--c4:#ab95d6;--c5:#5d6066;--c6:#e0707c;--on1:#10151b;
--on5:#e9e6e0;--good:#62c29a;--warn:#d9a24e;--bad:#e0707c;color-scheme:dark}
:root[data-theme=light]{color-scheme:light}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 var(--sans);
font-variant-numeric:tabular-nums;-webkit-font-smoothing:antialiased}
main{max-width:1120px;margin:0 auto;padding:44px 28px 80px}
header{display:flex;justify-content:space-between;align-items:flex-start;gap:24px}
h1{font:600 33px/1.15 var(--serif);margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font:600 21px/1.3 var(--serif);margin:46px 0 4px;padding-top:18px;
border-top:1px solid var(--rule)}
h3{font:600 13.5px/1.4 var(--sans);margin:0 0 8px}
h3.more{margin-top:26px}ul{margin:0;padding-left:18px;font-size:13.5px}
h3 small{font-weight:400;color:var(--soft);font-size:12.5px;margin-left:6px}
p.lead{font:18px/1.5 var(--serif);max-width:46em;margin:14px 0 0}
p.note{color:var(--soft);font-size:13.5px;margin:0 0 18px;max-width:54em}
.meta{color:var(--soft);font-size:13.5px;margin:6px 0 0}
.badge{display:inline-block;font:600 12px/1 var(--sans);padding:5px 9px;border-radius:99px;
border:1px solid currentColor;vertical-align:5px;margin-left:10px;letter-spacing:.01em}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.failure{border-left:3px solid var(--bad);padding:8px 14px;margin:18px 0 0;
background:var(--panel);
font-family:var(--mono);font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:22px 0;
margin:32px 0 0}
.tile{padding:0 18px;border-left:1px solid var(--rule)}
.tile b{display:block;font:600 25px/1.2 var(--serif);white-space:nowrap}
.tile b i{font-style:normal;color:var(--soft);font-weight:400;padding:0 3px}
.tile span{font-size:12.5px;color:var(--soft);display:block}
.grid2{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(460px,100%),1fr));
gap:30px 44px;
margin-top:20px}
.grid3{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(300px,100%),1fr));
gap:28px 36px;
margin-top:20px}
figure{margin:0;min-width:0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font:11px var(--sans);fill:var(--soft)}svg text.value{fill:var(--ink);font-size:11.5px}

.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.bound{stroke:var(--c6);stroke-width:1.2;stroke-dasharray:4 4}
.cross{stroke:var(--soft);stroke-width:1;visibility:hidden}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.faint{opacity:.28;
stroke-width:1.2}
.peak{stroke-width:5;opacity:.45}
path.c1{stroke:var(--c1)}path.c2{stroke:var(--c2)}path.c3{stroke:var(--c3)}
path.c4{stroke:var(--c4)}
path.c5{stroke:var(--c5)}path.c6{stroke:var(--c6)}
rect.c1,circle.c1{fill:var(--c1)}rect.c2,circle.c2{fill:var(--c2)}
rect.c3,circle.c3{fill:var(--c3)}
rect.c4,circle.c4{fill:var(--c4)}rect.c5,circle.c5{fill:var(--c5)}
rect.c6,circle.c6{fill:var(--c6)}
circle{stroke:var(--paper);stroke-width:1.5}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 6px;font-size:12.5px;
color:var(--soft)}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.key.c1,.piece.c1{background:var(--c1)}.key.c2,.piece.c2{background:var(--c2)}
.key.c3,.piece.c3{background:var(--c3)}.key.c4,.piece.c4{background:var(--c4)}
.key.c5,.piece.c5{background:var(--c5)}.key.c6,.piece.c6{background:var(--c6)}
.share{display:flex;align-items:center;gap:14px;margin:0 0 10px}
.share .role{flex:0 0 92px;font-size:13.5px}.share .bar{flex:1;display:flex;gap:2px;height:28px;
border-radius:3px;overflow:hidden}
.piece{color:var(--on1);font-size:12px;line-height:28px;padding-left:8px;white-space:nowrap;
overflow:hidden;
min-width:0}.piece.c5{color:var(--on5)}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{font-weight:500;color:var(--soft);text-align:left;padding:4px 14px 6px 0;
border-bottom:1px solid var(--rule)}
td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:middle}
td.n,th.n{text-align:right}tr.sum td{font-weight:600}
td code,.meta code{font:12.5px var(--mono)}td.m{color:var(--soft)}
.spark{width:96px;height:22px}.spark .line{stroke-width:1.5}
pre{font:12.8px/1.55 var(--mono);background:var(--panel);border:1px solid var(--rule);
border-radius:6px;
padding:16px 18px;overflow:auto;margin:16px 0 0}pre b{font-weight:600;color:var(--c1)}
pre em{font-style:normal;color:var(--soft)}
button,select{font:13px var(--sans);color:var(--ink);background:var(--panel);
border:1px solid var(--rule);
border-radius:6px;padding:5px 11px;cursor:pointer}
button:hover{border-color:var(--soft)}button[aria-pressed=true]{background:var(--ink);
color:var(--paper);
border-color:var(--ink)}
.bar2{display:flex;flex-wrap:wrap;gap:10px 22px;align-items:center;margin:16px 0 10px}
.bar2 .set{display:flex;gap:4px;align-items:center}.bar2 label{font-size:13px;color:var(--soft)}
.keys{font-size:12.5px;color:var(--soft);display:none;gap:4px 14px;flex-wrap:wrap;margin:0 0 14px}
.keys i{font-style:normal;font-family:var(--mono);padding:1px 7px;border-radius:3px;
color:var(--ink);
margin-right:2px}
[data-mode=mask] .keys.mask,[data-mode=version] .keys.version,[data-mode=logprob] .keys.logprob,
[data-mode=turn] .keys.turn{display:flex}
.group{display:none}.group.on{display:block}
details{background:var(--panel);border:1px solid var(--rule);border-radius:6px;margin:0 0 8px}
summary{cursor:pointer;padding:9px 14px;display:flex;flex-wrap:wrap;gap:3px 18px;font-size:13px;
color:var(--soft);list-style:none}summary::-webkit-details-marker{display:none}
summary::before{content:"";width:6px;height:6px;border-right:1.5px solid;
border-bottom:1.5px solid;
transform:rotate(-45deg);align-self:center;margin-right:-6px}
details[open] summary::before{transform:rotate(45deg)}
summary b{color:var(--ink);font-weight:600}
.tokens{font:13px/1.95 var(--mono);padding:6px 16px 14px;white-space:pre-wrap;
overflow-wrap:anywhere;
max-height:420px;overflow:auto}
.tokens span{border-radius:2px;padding:2px 0;color:var(--soft)}
.tokens span:hover{outline:1.5px solid var(--ink)}.tokens .s{color:var(--ink)}
.t-s{background:color-mix(in srgb,var(--c1) 22%,transparent)}
.v0{--v:14%}.v1{--v:26%}.v2{--v:38%}.v3{--v:50%}.v4{--v:62%}
.p0{--p:6%}.p1{--p:18%}.p2{--p:34%}.p3{--p:52%}.p4{--p:74%}
[data-mode=mask] .s{background:color-mix(in srgb,var(--c1) 22%,transparent)}
[data-mode=version] .s,i.v{background:color-mix(in srgb,var(--c3) var(--v),transparent)}
[data-mode=logprob] .s,i.p{background:color-mix(in srgb,var(--c2) var(--p),transparent)}
[data-mode=turn] .t0,i.t0{background:color-mix(in srgb,var(--c1) 22%,transparent)}
[data-mode=turn] .t1,i.t1{background:color-mix(in srgb,var(--c2) 24%,transparent)}
[data-mode=turn] .t2,i.t2{background:color-mix(in srgb,var(--c3) 26%,transparent)}
[data-mode=turn] .t3,i.t3{background:color-mix(in srgb,var(--c4) 26%,transparent)}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);
font:12px/1.5 var(--sans);
padding:6px 10px;border-radius:5px;white-space:pre;visibility:hidden;z-index:9;max-width:420px;
font-variant-numeric:tabular-nums}
footer{margin-top:64px;color:var(--soft);font-size:12.5px}
@media print{button,.bar2{display:none}.group{display:block}}
"""

SCRIPT = """
const $=(q,e=document)=>[...e.querySelectorAll(q)],tip=document.getElementById("tip");
function show(e,text){tip.textContent=text;tip.style.visibility="visible";
 const r=tip.getBoundingClientRect();let x=e.clientX+14,y=e.clientY+14;
 if(x+r.width>innerWidth-8)x=e.clientX-r.width-14;
 if(y+r.height>innerHeight-8)y=e.clientY-r.height-14;
 tip.style.left=x+"px";tip.style.top=y+"px"}
function hide(){tip.style.visibility="hidden"}
$("svg.lines").forEach(svg=>{const points=JSON.parse(svg.dataset.points),
 cross=svg.querySelector(".cross");
 svg.addEventListener("mousemove",e=>{const r=svg.getBoundingClientRect(),
  x=(e.clientX-r.left)/r.width*svg.viewBox.baseVal.width;
  const p=points.reduce((a,b)=>Math.abs(b[0]-x)<Math.abs(a[0]-x)?b:a);
  if(cross){cross.setAttribute("x1",p[0]);cross.setAttribute("x2",p[0]);
   cross.style.visibility="visible"}
  show(e,[p[1],...p[2].map(v=>v[0]+"  "+v[1])].join("\\n"))});
 svg.addEventListener("mouseleave",()=>{hide();if(cross)cross.style.visibility="hidden"})});
$(".tokens").forEach(box=>{box.addEventListener("mousemove",e=>{const d=e.target.dataset;
  if(!d||!d.t)return hide();const t=d.t.split(" ");
  show(e,t.length<4?"token "+t[0]+"\\nnot sampled":
   "token "+t[0]+"\\nlog-prob "+t[1]+"  (p = "+Math.exp(+t[1]).toPrecision(2)+")\\nversion "+t[2]+
   "\\nturn "+t[3])});
 box.addEventListener("mouseleave",hide)});
const box=document.getElementById("episodes");
if(box){$("button[data-set]",box).forEach(b=>b.onclick=()=>{box.dataset.mode=b.dataset.set;
  $("button[data-set]",box).forEach(o=>o.setAttribute("aria-pressed",o===b))});
 const pick=box.querySelector("select");if(pick)pick.onchange=()=>
  $(".group",box).forEach((g,i)=>g.classList.toggle("on",i===+pick.value))}
document.getElementById("theme").onclick=()=>{const r=document.documentElement,
 dark=r.dataset.theme?r.dataset.theme==="dark":matchMedia("(prefers-color-scheme: dark)").matches;
 r.dataset.theme=dark?"light":"dark"};
"""


def page(title: str, body: str) -> str:
    """The whole document; nothing in it is loaded from elsewhere."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f'<body><main>{body}</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def section(title: str, note: str, inside: str) -> str:
    """A part of the page; nothing where there is nothing inside."""
    if not inside:
        return ""
    remark = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{remark}{inside}</section>"


def figure(title: str, unit: str, chart: str) -> str:
    """A chart with its title; nothing where there is no chart."""
    if not chart:
        return ""
    small = f"<small>{escape(unit)}</small>" if unit else ""
    return f"<figure><h3>{escape(title)}{small}</h3>{chart}</figure>"
