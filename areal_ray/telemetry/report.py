"""report.html: one self-contained page from the records of a run folder.

It reads metrics.jsonl, summary.json, recipe.yaml and episodes.jsonl, whichever are there: a run
that was killed has a report too. Nothing is loaded from elsewhere, all text is escaped.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from areal_ray.core.journal import JOURNAL_FOLDER, resumption_lines
from areal_ray.core.storage import replace_text
from areal_ray.telemetry.charts import (
    NARROW,
    Point,
    Series,
    bar_chart,
    line_chart,
    number,
    share_bars,
    spark,
    stacked_columns,
)
from areal_ray.telemetry.episodes import EPISODES_FILE
from areal_ray.telemetry.names import METRICS
from areal_ray.telemetry.report_episodes import episodes_part
from areal_ray.telemetry.report_page import figure, page, section
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import METRICS_FILE
from areal_ray.telemetry.summary import read_summary
from areal_ray.telemetry.views import count_text, duration_text

REPORT_FILE = "report.html"
RECIPE_FILE = "recipe.yaml"

Rows = Sequence[Mapping[str, Any]]

_DOT = "  \u00b7  "
_YAML_KEY = re.compile(r"(\s*(?:- )?)([\w.]+)(?=:)")

_TRAINED_ON = {"sft": "examples", "dpo": "answers", "reward_model": "answers"}
_ROLE_TIMES = (
    ("learner", (("c5", "wait", "time/learner_wait_s"), ("c1", "train", "time/learner_train_s"),
                 ("c2", "publish", "time/learner_publish_s"),
                 ("c4", "checkpoint", "time/learner_checkpoint_s"))),
    ("rollout", (("c5", "idle", "time/rollout_idle_s"), ("c1", "sample", "time/rollout_busy_s"),
                 ("c2", "swap", "time/rollout_swap_s"))),
    ("episode", (("c1", "model", "time/agent_model_s"), ("c3", "tools", "time/agent_tool_s"),
                 ("c4", "reward", "time/agent_reward_s"))),
)  # fmt: skip

_LEARNER_CURVES = (
    ("Loss", "learner/loss"),
    ("Largest gradient norm", "learner/grad_norm_max"),
    ("Learning rate", "learner/lr"),
    ("Entropy", "learner/entropy_nats"),
    ("Clipped tokens", "learner/clipped_fraction"),
    ("KL in the step", "learner/policy_kl_nats"),
    ("KL from the behaviour policy", "learner/behaviour_kl_nats"),
    ("Behaviour weight, uncapped mean", "learner/behaviour_weight_mean"),
    ("Targets at first choice", "learner/token_accuracy_fraction"),
)


def write_report(run_folder: Path) -> Path:
    """Make report.html from what the run wrote so far; returns its path."""
    rows = read_rows(run_folder / METRICS_FILE)
    summary = read_summary(run_folder) or {}
    steps = [row for row in rows if row["kind"] == "step"]
    evals = [row for row in rows if row["kind"] == "eval"]
    recipe_path = run_folder / RECIPE_FILE
    recipe = recipe_path.read_text(encoding="utf-8") if recipe_path.exists() else ""
    name = str(summary.get("name") or run_folder.name)
    body = "".join(
        (
            _head(name, summary, steps, evals),
            _learning(steps, evals),
            _staleness(summary, steps),
            _time(steps),
            _flow(steps),
            _learner(steps),
            _endings(summary, steps, resumption_lines(run_folder / JOURNAL_FOLDER)),
            section(
                "Sample episodes",
                "Every token as the model saw it. Point at one for its id, log-prob, version and "
                "turn.",
                episodes_part(read_rows(run_folder / EPISODES_FILE)),
            ),
            section("Recipe", "As run, after all overrides.", _recipe(recipe)),
            section("Every metric", "", _table(rows)),
            "<footer>Made by areal-ray from metrics.jsonl, summary.json, recipe.yaml and "
            "episodes.jsonl in the run folder. Shown times are wall time.</footer>",
        )
    )
    path = run_folder / REPORT_FILE
    replace_text(path, page(f"{name}: report", body))
    return path


def _series(rows: Rows, name: str) -> list[Point]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _head(name: str, summary: Mapping[str, Any], steps: Rows, evals: Rows) -> str:
    outcome = str(summary.get("outcome", "still running, or ended without a summary"))
    tone = {"finished": "good", "stopped": "warn", "failed": "bad"}.get(outcome, "warn")
    last = (steps or evals or [{}])[-1]
    done = summary.get("steps", last.get("step", 0))
    version = summary.get("version", last.get("version"))
    wall_s = float(summary.get("wall_s") or last.get("wall_s", 0.0))
    facts = [f"{done} of {summary['planned_steps']} steps" if summary.get("planned_steps")
             else f"{done} steps",
             *([] if version is None else [f"version {version}"]),
             duration_text(wall_s)]  # fmt: skip
    if "seed" in summary:
        facts.append(f"seed {summary['seed']}")
    if "kind" in summary:
        facts.insert(0, f"kind {summary['kind']}")
    failure = summary.get("failure")
    failed = f'<div class="failure">{escape(str(failure))}</div>' if failure else ""
    return (
        f'<header><div><h1>{escape(name)}<span class="badge {tone}">{escape(outcome)}</span></h1>'
        f'<p class="meta">{escape(_DOT.join(facts))}</p></div>'
        f'<button id="theme" title="Switch between light and dark">Light / dark</button></header>'
        f"{_lead(summary, steps, evals)}{failed}{_tiles(summary, steps, wall_s)}"
    )


def _lead(summary: Mapping[str, Any], steps: Rows, evals: Rows) -> str:
    accuracy = _series(evals, "eval/accuracy_fraction")
    reward = summary.get("reward") or {}
    sentences = []
    if len(accuracy) > 1:
        (first_step, first), (last_step, last) = accuracy[0], accuracy[-1]
        word = "rose" if last > first else "fell" if last < first else "stayed"
        start = "before training" if first_step == 0 else f"at step {first_step}"
        sentences.append(
            f"Held-out accuracy {word} from {first:.3f} {start} to {last:.3f} at step {last_step}."
        )
    if reward.get("first") is not None and reward.get("last") is not None:
        sentences.append(
            f"Mean sampled reward went from {reward['first']:.3f} in the first steps to "
            f"{reward['last']:.3f} in the last."
        )
    losses = _series(steps, "learner/loss")
    if not sentences and len(losses) > 1:
        sentences.append(f"The loss went from {losses[0][1]:.4g} to {losses[-1][1]:.4g}.")
    return f'<p class="lead">{" ".join(sentences)}</p>' if sentences else ""


def _tiles(summary: Mapping[str, Any], steps: Rows, wall_s: float) -> str:
    tiles: list[tuple[str, str]] = []
    evaluation, staleness = summary.get("eval") or {}, summary.get("staleness") or {}
    arrow = "<i>\u2192</i>"
    if evaluation.get("after") is not None:
        before = evaluation.get("before")
        start = f"{before:.2f}{arrow}" if before is not None else ""
        tiles.append((f"{start}{evaluation['after']:.2f}", "held-out accuracy"))
    if staleness.get("mean") is not None:
        bound = "no bound" if staleness.get("bound") is None else f"bound {staleness['bound']}"
        label = f"mean staleness; most {staleness['max']}, {bound}"
        tiles.append((f"{staleness['mean']:.2f}", label))
    tokens = summary.get("tokens") or {}
    if tokens.get("trained"):
        sampled = f", {count_text(tokens['sampled'])} sampled" if tokens.get("sampled") else ""
        tiles.append((count_text(tokens["trained"]), f"tokens trained{sampled}"))
    sequences = _total(steps, "learner/sequences")
    if sequences and wall_s:
        what = _TRAINED_ON.get(summary.get("kind", ""), "trajectories")
        label = f"{what} trained per second of the run"
        tiles.append((number(sequences / wall_s), label))
    publish = summary.get("publish") or {}
    if publish.get("engine_idle_s") is not None:
        label = f"ms an engine stands still per publish ({publish['count']})"
        tiles.append((f"{1000 * publish['engine_idle_s']:.1f}", label))
    driver = summary.get("driver") or {}
    if driver.get("trajectories"):
        per = 1000 * driver["cpu_s"] / driver["trajectories"]
        carried = driver.get("bytes_per_trajectory")
        more = f", {carried:.0f} bytes" if carried is not None else ""
        tiles.append((f"{per:.2f}", f"ms driver CPU per trajectory{more}"))
    inside = "".join(
        f'<div class="tile"><b>{b}</b><span>{escape(t)}</span></div>' for b, t in tiles
    )
    return f'<div class="tiles">{inside}</div>' if inside else ""


def _learning(steps: Rows, evals: Rows) -> str:
    rewards = _series(steps, "reward/mean")
    is_share = all(0.0 <= y <= 1.0 for _, y in rewards)
    accuracy = _series(evals, "eval/accuracy_fraction")
    charts = figure(
        "Reward",
        "mean of the episodes trained on, as scored",
        line_chart([Series("reward", rewards)], y_range=(0.0, 1.0) if is_share else None),
    ) + figure(
        "Held-out accuracy",
        "of the weights after that step",
        line_chart([Series("accuracy", accuracy, "c3", is_marked=True)], y_range=(0.0, 1.0)),
    )
    return section("Learning", "", f'<div class="grid2">{charts}</div>' if charts else "")


def _staleness(summary: Mapping[str, Any], steps: Rows) -> str:
    staleness = summary.get("staleness") or {}
    bars = [(str(k), float(n)) for k, n in (staleness.get("histogram") or {}).items()]
    bound = staleness.get("bound")
    charts = figure(
        "Staleness of trained groups", "share of groups", bar_chart(bars, x_name="versions")
    ) + figure(
        "By step",
        "versions",
        line_chart(
            [Series("max", _series(steps, "staleness/max_versions"), "c2", is_peak=True),
             Series("mean", _series(steps, "staleness/mean_versions"))],
            from_zero=True,
            band=(float(bound), f"bound {bound}") if bound is not None else None,
        ) if _series(steps, "staleness/mean_versions") else "",
    )  # fmt: skip
    note = "Learner version less the oldest version that sampled any trained token of the group."
    return section("Staleness", note, f'<div class="grid2">{charts}</div>' if charts else "")


def _time(steps: Rows) -> str:
    rows = []
    for role, parts in _ROLE_TIMES:
        cuts = [(c, part, sum(row.get(n) or 0.0 for row in steps)) for c, part, n in parts]
        if sum(seconds for _, _, seconds in cuts) > 0:
            rows.append((role, cuts))
    bars = share_bars(rows)
    learner = [Series(part, _series(steps, name), c) for c, part, name in _ROLE_TIMES[0][1]]
    layers = [layer for layer in learner if any(y > 0 for _, y in layer.points)]
    columns = stacked_columns([row["step"] for row in steps], layers) if layers else ""
    tokens = line_chart(
        [Series("sampled", _series(steps, "rollout/tokens_per_s")),
         Series("trained", _series(steps, "learner/tokens_per_s"), "c2")],
        from_zero=True,
    )  # fmt: skip
    charts = figure("Where the learner's time goes", "seconds a step", columns)
    charts += figure("Tokens per second", "", tokens)
    shares = f'<figure style="margin-top:20px">{bars}</figure>' if bars else ""
    grid = f'<div class="grid2">{charts}</div>' if charts else ""
    note = "Shares of each role's wall time over the run; an episode's own time in the last row."
    return section("Time by role", note, shares + grid) if bars else section("Speed", "", grid)


def _flow(steps: Rows) -> str:
    milliseconds = [(x, 1000 * y) for x, y in _series(steps, "publish/wall_s")]
    idle = [(x, 1000 * y) for x, y in _series(steps, "publish/engine_idle_s")]
    queue = [
        Series("queued", _series(steps, "queue/depth_groups")),
        Series("being rolled out", _series(steps, "admission/running_groups"), "c3"),
    ]
    charts = figure("Groups", "after the step took its own", line_chart(queue, from_zero=True))
    charts += figure(
        "Publishing weights",
        "milliseconds",
        line_chart(
            [Series("publish", milliseconds), Series("engine stands still", idle, "c2")],
            from_zero=True,
        ),
    )
    return section("Queue and weights", "", f'<div class="grid2">{charts}</div>' if charts else "")


def _learner(steps: Rows) -> str:
    charts = "".join(
        figure(
            title,
            METRICS[name].unit,
            line_chart([Series(title, _series(steps, name))], width=NARROW),
        )
        for title, name in _LEARNER_CURVES
    )
    return section("Learner", "", f'<div class="grid3">{charts}</div>' if charts else "")


def _endings(summary: Mapping[str, Any], steps: Rows, resumed: Sequence[str]) -> str:
    ledger = summary.get("ledger") or {}
    tables = ""
    if ledger.get("admitted"):
        order = ("trained", "dropped", "failed", "in_flight")
        lines = [(key.replace("_", " "), ledger.get(key, 0)) for key in order]
        tables += f"<figure><h3>Ledger<small>groups, each ends once</small></h3>{_counts(lines)}"
        reasons = list((ledger.get("reasons") or {}).items())
        told = f"<h3 class=more>Reasons</h3>{_counts(reasons, total=False)}" if reasons else ""
        tables += f"{told}</figure>"
    outcomes = ("ok", "truncated", "agent_error", "env_error", "timeout")
    lines = [
        (outcome.replace("_", " "), _total(steps, f"agent/{outcome}_episodes"))
        for outcome in outcomes
    ]
    lines.append(("unscored", _total(steps, "reward/unscored_episodes")))
    if any(n for _, n in lines):
        told = _counts(lines)
        tables += f"<figure><h3>Episodes by outcome</h3>{told}</figure>"
    listed = _listed("Actors lost and replaced", summary.get("replaced") or ())
    listed += _listed("Numbers of actors changed", summary.get("scaled") or ())
    listed += _listed("Set aside by a publish", summary.get("publish_events") or ())
    listed += _listed("Resumed from a checkpoint", resumed)
    note = "Nothing that could not be scored was trained on; a failure is never a reward of zero."
    grid = f'<div class="grid2">{tables}</div>' if tables else ""
    return section("How groups and episodes ended", note, grid + listed)


def _listed(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(str(line))}</li>" for line in lines)
    return f"<h3 class=more>{title}</h3><ul>{items}</ul>" if items else ""


def _total(steps: Rows, name: str) -> int:
    return int(sum(row.get(name) or 0 for row in steps))


def _counts(lines: Sequence[tuple[str, int]], *, total: bool = True) -> str:
    whole = sum(n for _, n in lines)
    body = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{n:,}</td>'
        f'<td class="n">{100 * n / whole if whole else 0:.1f} %</td></tr>'
        for name, n in lines
    )
    foot = (
        f'<tr class="sum"><td>all</td><td class="n">{whole:,}</td><td></td></tr>' if total else ""
    )
    return f"<table>{body}{foot}</table>"


def _recipe(text: str) -> str:
    if not text.strip():
        return ""
    return f"<pre>{chr(10).join(_recipe_line(line) for line in text.splitlines())}</pre>"


def _recipe_line(line: str) -> str:
    if line.lstrip().startswith("#"):
        return f"<em>{escape(line)}</em>"
    key = _YAML_KEY.match(line)
    if key is None:
        return escape(line)
    rest, mark, remark = line[key.end() :].partition(" #")
    told = f"<em>{escape(mark + remark)}</em>" if mark else ""
    return f"{escape(key[1])}<b>{escape(key[2])}</b>{escape(rest)}{told}"


def _table(rows: Rows) -> str:
    names = sorted({name for row in rows for name in row if "/" in name})
    lines = []
    for name in names:
        values = [float(y) for _, y in _series(rows, name)]
        if not values:
            continue
        known = name in METRICS  # a metric that the run's own code declared is not
        unit, meaning = (METRICS[name].unit, METRICS[name].meaning) if known else ("", "")
        lines.append(
            f"<tr><td><code>{escape(name)}</code></td><td>{spark(values)}</td>"
            f'<td class="n">{number(values[0])}</td><td class="n">{number(values[-1])}</td>'
            f'<td class="n">{number(min(values))}</td><td class="n">{number(max(values))}</td>'
            f'<td class="m">{escape(unit)}</td><td class="m">{escape(meaning)}</td></tr>'
        )
    if not lines:
        return ""
    head = "".join(f'<th class="n">{h}</th>' for h in ("first", "last", "least", "most"))
    table = (
        f"<table><tr><th>name</th><th></th>{head}<th>unit</th><th>meaning</th></tr>"
        f"{''.join(lines)}</table>"
    )
    return f"<details><summary>{len(lines)} metrics, each with its curve</summary>" \
           f'<div style="padding:4px 16px 16px;overflow:auto">{table}</div></details>'  # fmt: skip
