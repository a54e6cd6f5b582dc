"""The last words of a run: curves and outcome as lines of text, for terminal and notebook."""

from collections.abc import Sequence
from pathlib import Path

from areal_ray.telemetry.plot import Point, plot
from areal_ray.telemetry.summary import Summary
from areal_ray.telemetry.views import count_text, duration_text

_PLOT_LINES = 7
_GAP = 4


def closing_lines(
    summary: Summary,
    rewards: Sequence[Point],
    evals: Sequence[Point],
    *,
    report: Path | None = None,
    width: int = 96,
    ascii_only: bool = False,
) -> list[str]:
    """Curves side by side where they fit, then the facts, then where to read on."""
    lines = [outcome_line(summary), ""]
    curves = curve_lines(rewards, evals, width=width, ascii_only=ascii_only, kind=summary.kind)
    if curves:
        lines += [*curves, ""]
    facts = summary_facts(summary)
    size = max((len(name) for name, _ in facts), default=0)
    lines += [f"{name:<{size}}  {text}" for name, text in facts]
    if report is not None:
        lines.append(f"{'report':<{size}}  {report}")
    return lines


def outcome_line(summary: Summary) -> str:
    """How it ended, in one line."""
    wall = duration_text(summary.wall_s)
    took = f"{summary.steps} of {summary.planned_steps} steps in {wall}"
    if summary.kind == "eval":
        took = f"scored in {wall}" if summary.outcome == "finished" else wall
    if summary.kind == "inference":
        took = f"served for {wall}"
    if summary.outcome == "failed":
        return f"{summary.name} failed after {took}: {summary.failure or 'no reason known'}"
    return f"{summary.name} {summary.outcome}: {took}"


def curve_lines(
    rewards: Sequence[Point],
    evals: Sequence[Point],
    *,
    width: int = 96,
    ascii_only: bool = False,
    kind: str = "rl",
) -> list[str]:
    """The curves of a run as text; nothing for a curve of fewer than two points."""
    is_scored = kind not in ("sft", "dpo", "reward_model", "distill")
    panels = []
    for title, points, y_range in (
        ("reward, by step" if is_scored else "loss, by step", rewards, None),
        ("held-out accuracy, by step", evals, (0.0, 1.0)),
    ):
        if len(points) > 1:
            panels.append((title, points, y_range))
    if not panels:
        return []
    beside = len(panels) > 1 and width >= 72
    room = (width - _GAP) // 2 if beside else min(width, 72)
    blocks = []
    for title, points, y_range in panels:
        if y_range is None and all(0.0 <= y <= 1.0 for _, y in points) and is_scored:
            y_range = (0.0, 1.0)
        drawn = plot(
            points, width=room - 7, height=_PLOT_LINES, y_range=y_range, ascii_only=ascii_only
        )
        blocks.append([title, *drawn])
    if not beside:
        return [line for block in blocks for line in block]
    return [f"{left:<{room + _GAP}}{right}".rstrip() for left, right in zip(*blocks, strict=True)]


def summary_facts(summary: Summary) -> list[tuple[str, str]]:
    """What a run came to, as pairs of name and text, most telling first."""
    facts: list[tuple[str, str]] = []
    evaluation, reward, staleness = summary.eval, summary.reward, summary.staleness
    if evaluation.after is not None:
        has_before = evaluation.before is not None and summary.kind != "eval"
        before = f"{evaluation.before:.3f} -> " if has_before else ""
        facts.append(("held-out", f"{before}{evaluation.after:.3f}"))
    if reward.first is not None and reward.last is not None:
        facts.append(("reward", f"{reward.first:.3f} -> {reward.last:.3f}"))
    if staleness.mean is not None:
        bound = "unlimited" if staleness.bound is None else str(staleness.bound)
        text = f"mean {staleness.mean:.2f}, max {staleness.max} (bound {bound})"
        facts.append(("staleness", text))
    ledger = summary.ledger
    if ledger.admitted:
        text = f"{ledger.trained} trained, {ledger.dropped} dropped, {ledger.failed} failed"
        facts.append(("groups", f"{text}, {ledger.in_flight} in flight of {ledger.admitted}"))
    if summary.tokens.trained:
        sampled = (
            f"{count_text(summary.tokens.sampled)} sampled, " if summary.tokens.sampled else ""
        )
        facts.append(("tokens", f"{sampled}{count_text(summary.tokens.trained)} trained"))
    publish = summary.publish
    if publish.count and publish.mean_s is not None:
        idle = publish.engine_idle_s
        still = "" if idle is None else f", engines stood still {1000 * idle:.2g} ms each"
        differed = f", {publish.differing} canaries differed" if publish.differing else ""
        text = f"{publish.count}, {publish.mean_s:.2f} s each{still}{differed}"
        facts.append(("publishes", text))
    if summary.scaled:
        facts.append(("scaled", "; ".join(summary.scaled)))
    if summary.replaced:
        facts.append(("replaced", "; ".join(summary.replaced)))
    return facts
