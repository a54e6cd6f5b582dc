"""What each kind of run is made of: its loop, its actors, the sections it needs and refuses."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from areal_ray.engines.lora_config import engine_problems

RunKind = Literal["rl", "online", "sft", "dpo", "reward_model", "distill", "eval", "inference"]
Loop = Literal["train", "fit", "prefer", "evaluate", "serve"]
"""Of `driver`: train = with rollouts, fit = on given conversations, prefer = on pairs, serve =
until it is stopped."""

_ROLLED_OUT = ("tasks", "reward", "admission", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a kind of run consists of."""

    loop: Loop
    needs: tuple[str, ...]
    refuses: tuple[str, ...] = ()
    trains: bool = True
    """It has learner actors."""
    samples: bool = False
    """It has rollout and agent actors, and reward actors where there is a reward."""
    serves: bool = False
    """A gateway answers clients, in place of agent actors; where it trains, from their episodes."""
    scores: bool = True
    """Rewards score the episodes that are trained on, not held-out ones alone."""

    @property
    def has_versions(self) -> bool:
        """Whether anybody samples from its weights; a run without rollouts has steps alone."""
        return self.samples


_KINDS: dict[str, Parts] = {
    "rl": Parts(
        loop="train",
        samples=True,
        needs=("tasks", "reward", "admission"),
        refuses=("sft", "preference"),
    ),
    "online": Parts(
        loop="train",
        samples=True,
        serves=True,
        needs=("admission",),
        refuses=("tasks", "sft", "preference"),
    ),
    "sft": Parts(
        loop="fit",
        needs=("sft",),
        refuses=(*_ROLLED_OUT, "critic", "reference", "teacher", "preference"),
    ),
    "dpo": Parts(
        loop="prefer",
        needs=("preference", "reference"),
        refuses=(*_ROLLED_OUT, "critic", "teacher", "sft"),
    ),
    "reward_model": Parts(
        loop="prefer",
        needs=("preference",),
        refuses=(*_ROLLED_OUT, "critic", "reference", "teacher", "sft"),
    ),
    "distill": Parts(
        loop="train",
        samples=True,
        scores=False,
        needs=("tasks", "teacher", "admission"),
        refuses=("critic", "preference"),
    ),
    "eval": Parts(
        loop="evaluate",
        samples=True,
        trains=False,
        needs=("evaluation", "reward"),
        refuses=("sft", "admission", "preference"),
    ),
    "inference": Parts(
        loop="serve",
        samples=True,
        trains=False,
        serves=True,
        needs=(),
        refuses=(*_ROLLED_OUT, "critic", "reference", "teacher", "sft", "preference"),
    ),
}
_OFFLINE = Parts(
    loop="fit",
    needs=("sft", "teacher"),
    refuses=(*_ROLLED_OUT, "critic", "reference", "preference"),
)
"""Kind distill with the section sft: on given conversations in place of the student's own."""


def parts_of(kind: RunKind, *, has_sft: bool) -> Parts:
    """What a recipe of this kind is made of."""
    return _OFFLINE if kind == "distill" and has_sft else _KINDS[kind]


def planned_steps(recipe: Any) -> int:
    """Learner steps that a recipe asks for, whatever section says so."""
    for section in (recipe.sft, recipe.preference):
        if section is not None:
            return int(getattr(section, "planned_steps", 0) or section.steps)
    return int(recipe.steps)


def section_problems(recipe: Any) -> Iterator[str]:
    """Sections that a recipe lacks, has in vain, or that do not go together."""
    kind, parts = recipe.kind, parts_of(recipe.kind, has_sft=recipe.sft is not None)
    for name in parts.needs:
        if getattr(recipe, name) is None:
            yield f"{name}: is missing; kind: {kind} needs it. Add the section."
    for name in parts.refuses:
        if getattr(recipe, name) is not None:
            yield f"{name}: is given; kind: {kind} has no use for it. Remove the section."
    if parts.trains and parts.loop != "train" and recipe.objective != type(recipe.objective)():
        yield f"objective: is given; kind: {kind} has no use for it. Remove the section."
    lora = recipe.model.lora
    if lora is not None and not parts.trains:
        yield f"model.lora: is given; kind: {kind} trains nothing. Remove the section."
    elif lora is not None and parts.samples:
        yield from engine_problems(lora, recipe.rollout.engine.kind)
    if parts.serves:
        yield from _serving_problems(recipe, parts)
    elif recipe.gateway != type(recipe.gateway)():
        yield f"gateway: is given; kind: {kind} has no use for it. Remove the section."
    if parts.loop == "train":
        yield from _bounds_problems(recipe)
    elif recipe.bounds != type(recipe.bounds)():
        yield f"bounds: is given; kind: {kind} has no use for it. Remove the section."
    if kind == "distill" and parts is not _OFFLINE:
        yield from _distill_problems(recipe)
    if kind == "sft" and recipe.sft is not None and recipe.sft.distillation is not None:
        yield (
            "sft.distillation: is given with kind: sft, which has no teacher. Use kind: distill "
            "and the section teacher, or remove it."
        )
    if kind == "reward_model" and recipe.preference is not None:
        yield from recipe.preference.reward_model_problems()


def _serving_problems(recipe: Any, parts: Parts) -> Iterator[str]:
    gateway = recipe.gateway
    if gateway.no_key and parts.trains:
        yield (
            f"gateway.no_key: is true with kind: {recipe.kind}, whose sessions have keys; must be "
            "false. Remove it."
        )
    elif gateway.no_key and not gateway.is_on_loopback:
        yield (
            f"gateway.no_key: is true with gateway.host {gateway.host}, where others reach "
            "it; must be false beyond loopback. Remove it, or set host to 127.0.0.1."
        )
    if gateway.upstream and not parts.trains:
        yield (
            f"gateway.upstream: is given with kind: {recipe.kind}, which has no sessions that "
            "others could serve. Remove it, or use kind: online."
        )
    if recipe.evaluation is None and recipe.agent != type(recipe.agent)():
        yield (
            f"agent: is given with kind: {recipe.kind}, whose agents are programs of "
            "their own. Remove the section; parsers and time-outs are in the section gateway."
        )
    if recipe.evaluation is not None and recipe.reward is None:
        yield (
            "reward: is missing with the section evaluation, whose held-out attempts it scores. "
            "Add it, or remove evaluation."
        )
    if recipe.admission is not None and recipe.admission.at_consumption == "wait":
        yield (
            "admission.at_consumption: is wait with kind: online, where a step would wait for "
            "clients that may never come; must be drop or mask. Change it."
        )


def _bounds_problems(recipe: Any) -> Iterator[str]:
    bounds, admission = recipe.bounds, recipe.admission
    if bounds.gate is not None and recipe.evaluation is None:
        yield (
            "bounds.gate: is given without the section evaluation, whose held-out tasks it needs. "
            "Add it, or remove the gate."
        )
    if bounds.max_kl_nats is not None and recipe.objective.kl is None:
        yield (
            f"bounds.max_kl_nats: is {bounds.max_kl_nats:g} without objective.kl, by which it is "
            "measured. Add 'objective.kl: {kl_ctl: 0.001}' and 'reference: {path: null}'."
        )
    if admission is None or not bounds.min_rewarded_sessions:
        return
    ahead = admission.max_head_offpolicyness
    groups = admission.unconsumed_groups
    if isinstance(ahead, int):
        groups = (ahead + 1) * admission.groups_per_step
    most = groups * admission.scored_samples_needed
    if bounds.min_rewarded_sessions > most:
        yield (
            f"bounds.min_rewarded_sessions: is {bounds.min_rewarded_sessions}; must be at most "
            f"{most}, what {groups} groups are sure to have, which is all that may wait. Lower "
            "it, or raise admission.groups_per_step or min_scored_samples."
        )


def _distill_problems(recipe: Any) -> Iterator[str]:
    distillation, admission = recipe.objective.distillation, recipe.admission
    if distillation is not None and distillation.rl_weight:
        yield (
            f"objective.distillation.rl_weight: is {distillation.rl_weight:g} with kind: distill, "
            "whose episodes have no reward; must be 0. Use kind: rl with the section reward."
        )
    if admission is not None and admission.drop_equal_rewards:
        yield (
            "admission.drop_equal_rewards: is true with kind: distill, whose episodes have no "
            "reward; must be false. Remove it."
        )
    for name, other in (("reward", "evaluation"), ("evaluation", "reward")):
        if getattr(recipe, name) is not None and getattr(recipe, other) is None:
            yield (
                f"{name}: is given without {other}; in kind: distill rewards score held-out tasks "
                "alone. Give both or neither."
            )
