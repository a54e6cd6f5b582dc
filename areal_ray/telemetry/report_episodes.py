"""Sample episodes of report.html: each token coloured by who wrote it, version or log-prob."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_MOST_GROUPS = 24
_MOST_TOKENS = 4000  # of one episode; a page with millions of spans does not scroll
_LIKELY = (0.9, 0.5, 0.1, 0.01)
_LIKELY_NAMES = ("p \u2265 .9", ".5 to .9", ".1 to .5", ".01 to .1", "below .01")

Line = Mapping[str, Any]


def episodes_part(lines: Sequence[Line]) -> str:
    """The body of the section; empty without episodes."""
    groups: dict[tuple[int, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["step"], line["group_id"]), []).append(line)
    if not groups:
        return ""
    chosen = _spread(list(groups.items()), _MOST_GROUPS)
    last = len(chosen) - 1
    options = "".join(
        f'<option value="{i}"{" selected" if i == last else ""}>'
        f"step {step}, task {escape(group[0]['task_id'])}</option>"
        for i, ((step, _), group) in enumerate(chosen)
    )
    blocks = "".join(
        f'<div class="group{" on" if i == last else ""}">{_group(group)}</div>'
        for i, (_, group) in enumerate(chosen)
    )
    modes = (("mask", "Who wrote it"), ("version", "Version"), ("logprob", "Log-prob"),
             ("turn", "Turn"))  # fmt: skip
    buttons = "".join(
        f'<button data-set="{mode}" aria-pressed="{"true" if mode == "mask" else "false"}">'
        f"{name}</button>"
        for mode, name in modes
    )
    return (
        '<div id="episodes" data-mode="mask"><div class="bar2">'
        f'<span class="set"><label for="pick">Group</label><select id="pick">{options}</select>'
        f'</span><span class="set"><label>Colour by</label>{buttons}</span></div>'
        f"{_keys()}{blocks}</div>"
    )


def _keys() -> str:
    likely = "".join(f'<span><i class="p p{i}">{n}</i></span>' for i, n in enumerate(_LIKELY_NAMES))
    turns = "".join(f'<span><i class="t{i}">{i}</i></span>' for i in range(4))
    return (
        '<p class="keys mask"><span><i class="t-s">sampled</i> by the policy, in the loss</span>'
        "<span><i>given</i> prompt, template or tool result, masked out</span></p>"
        f'<p class="keys logprob"><span>probability when sampled:</span>{likely}</p>'
        f'<p class="keys turn"><span>model call:</span>{turns}</p>'
    )


def _group(lines: Sequence[Line]) -> str:
    versions = sorted({t["version"] for line in lines for t in line["tokens"] if t["mask"]})
    shade = {v: round(i * 4 / max(1, len(versions) - 1)) for i, v in enumerate(versions)}
    keys = "".join(f'<i class="v v{shade[v]}">{v}</i>' for v in versions)
    episodes = "".join(_episode(line, shade, is_open=i < 2) for i, line in enumerate(lines))
    return f'<p class="keys version"><span>sampled by version: {keys}</span></p>{episodes}'


def _episode(line: Line, shade: Mapping[int, int], *, is_open: bool) -> str:
    tokens = line["tokens"]
    oldest, newest = line["versions"]
    version = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
    reward = line["reward"]
    tone = "" if reward is None else ("good" if reward > 0 else "bad")
    told = "no reward" if reward is None else f"reward {reward:.3g}"
    branch = f", branch {line['branch_id']}" if line["branch_id"] else ""
    sampled = sum(t["mask"] for t in tokens)
    facts = [
        f"<b>sample {line['sample']}{branch}</b>",
        f'<b class="{tone}">{told}</b>',
        f"<span>{escape(line['outcome'])}, ended by {escape(line['finish_reason'])}</span>",
        f"<span>{version}</span>",
        f"<span>{sampled} of {len(tokens)} tokens sampled</span>",
    ]
    if line["failure"]:
        facts.append(f'<span class="bad">{escape(line["failure"])}</span>')
    cut = len(tokens) - _MOST_TOKENS
    more = f"\n({cut} more tokens are in episodes.jsonl)" if cut > 0 else ""
    spans = "".join(_token(t, shade) for t in tokens[:_MOST_TOKENS])
    return (
        f"<details{' open' if is_open else ''}><summary>{''.join(facts)}</summary>"
        f'<div class="tokens">{spans}{more}</div></details>'
    )


def _token(token: Mapping[str, Any], shade: Mapping[int, int]) -> str:
    text = escape(token["text"]).replace("\n", "\u21b5\n")
    if not token["mask"]:
        return f'<span data-t="{token["id"]}">{text}</span>'
    logprob = token["logprob"]
    likely = math.exp(logprob) if logprob is not None else 0.0
    bucket = next((i for i, least in enumerate(_LIKELY) if likely >= least), len(_LIKELY))
    return (
        f'<span class="s v{shade[token["version"]]} p{bucket} t{max(0, token["turn"]) % 4}" '
        f'data-t="{token["id"]} {logprob} {token["version"]} {token["turn"]}">{text}</span>'
    )


def _spread(
    groups: list[tuple[tuple[int, str], list[Line]]], most: int
) -> list[tuple[tuple[int, str], list[Line]]]:
    """At most `most` groups, evenly over the run, the first and the last among them."""
    if len(groups) <= most:
        return groups
    return [groups[round(i * (len(groups) - 1) / (most - 1))] for i in range(most)]
