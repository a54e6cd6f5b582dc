"""Which actor sits where: the layout of a run, whether a cluster holds it, and the reservation.

The first half is arithmetic and needs no Ray: `areal-ray plan` shows its table. `reserve` is the
other half: one placement group for each rollout replica, since a group cannot be resized, one for
the learner's ranks, and one of CPU bundles for the rest.

reserve waits for the placement groups; bounded by deadlines.placement_s.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING
from uuid import uuid4

from areal_ray.agents.episode import AgentConfig
from areal_ray.engines.train_config import LearnerConfig
from areal_ray.errors import PlacementError
from areal_ray.rewards.reward import RewardConfig
from areal_ray.runtime.gateway_config import GatewayConfig
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.run_config import ClusterConfig

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from areal_ray.runtime.fleet import Seat

PARAM_SYNC = "param-sync"
ROLLOUT = "rollout"
EVALUATION = "evaluation"
EVALUATION_AGENT = "evaluation-agent"
GATEWAY = "gateway"
REPLICA_PART = "rollout-part"
"""Role of the GPUs over which one replica's model is split; its engine's own actors sit there."""

_PARAM_SYNC_CPUS = 0.1
_LEAST_CPUS = 0.01  # Ray refuses an empty bundle
_UNITS = ("num_cpus", "num_gpus")
_SLACK = 1e-6  # Ray counts in ten-thousandths
_LOOK_S, _GLANCE_S = 0.2, 0.01
"""At the first placement group that is waited for, and at each of the others."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one actor takes of one node."""

    name: str
    """Of the actor, such as `rollout-0`."""
    role: str
    num_cpus: float
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Layout:
    """All bundles of a run, by placement group."""

    groups: dict[str, tuple[Bundle, ...]]
    on_one_node: frozenset[str] = frozenset()
    """Groups whose bundles must not be spread over nodes."""

    @classmethod
    def of(cls, groups: dict[str, tuple[Bundle, ...]]) -> "Layout":
        """The layout of these groups; a replica that is split over GPUs stays on one node."""
        split = {name for name, group in groups.items() if group[-1].role == REPLICA_PART}
        return cls(groups, frozenset(split))

    @property
    def bundles(self) -> list[Bundle]:
        """Every bundle, in order."""
        return [bundle for group in self.groups.values() for bundle in group]

    def demand(self, unit: str) -> float:
        """Sum of `num_cpus` or `num_gpus`."""
        return sum(getattr(bundle, unit) for bundle in self.bundles)


@dataclass(frozen=True, slots=True)
class NodeSupply:
    """What one node has."""

    name: str
    num_cpus: float
    num_gpus: float = 0.0


def plan_layout(
    *,
    rollout: RolloutConfig | None = None,
    learner: LearnerConfig | None = None,
    agent: AgentConfig | None = None,
    reward: RewardConfig | None = None,
    gateway: GatewayConfig | None = None,
    has_evaluation: bool = False,
) -> Layout:
    """The bundles of a run; a role that is None has no actors."""
    groups: dict[str, tuple[Bundle, ...]] = {}
    services: list[Bundle] = []
    if rollout is not None:
        for index in range(rollout.replicas):
            groups[f"{ROLLOUT}-{index}"] = replica_bundles(f"{ROLLOUT}-{index}", ROLLOUT, rollout)
        if has_evaluation:
            groups[EVALUATION] = replica_bundles(EVALUATION, EVALUATION, rollout)
            if agent is not None:  # its own, so that neither holds up the other
                services.append(Bundle(EVALUATION_AGENT, EVALUATION_AGENT, _cpus(agent.num_cpus)))
    if learner is not None:
        groups["learner"] = tuple(
            _bundles("learner", learner.ranks, learner.num_cpus, learner.num_gpus)
        )
    if agent is not None and gateway is None:  # else programs outside attempt the tasks
        services += _bundles("agent", agent.replicas, agent.num_cpus)
    if reward is not None:
        services += _bundles("reward", reward.replicas, reward.num_cpus)
    if gateway is not None:
        services += _bundles(GATEWAY, gateway.replicas, gateway.num_cpus)
    if rollout is not None and learner is not None:
        services.append(Bundle(PARAM_SYNC, PARAM_SYNC, _PARAM_SYNC_CPUS))
    if services:
        groups["services"] = tuple(services)
    return Layout.of(groups)


def assign(layout: Layout, nodes: Sequence[NodeSupply], cluster: ClusterConfig) -> dict[str, str]:
    """Bundle name -> node name, the largest bundles first; Ray may choose otherwise.

    Raises:
        PlacementError: the nodes do not hold the layout; names demand, supply and the keys.
    """
    _check_nodes(nodes, cluster)
    for unit, word in (("num_gpus", "GPUs"), ("num_cpus", "CPUs")):
        supply = sum(getattr(node, unit) for node in nodes)
        if layout.demand(unit) > supply + _SLACK:
            raise PlacementError(_too_much(layout, nodes, unit, word))
    free = {node.name: [node.num_cpus, node.num_gpus] for node in nodes}
    placed: dict[str, str] = {}
    for bundle in sorted(_units(layout), key=lambda b: (-b.num_gpus, -b.num_cpus)):
        for name, (cpus, gpus) in free.items():
            if bundle.num_cpus <= cpus + _SLACK and bundle.num_gpus <= gpus + _SLACK:
                free[name] = [cpus - bundle.num_cpus, gpus - bundle.num_gpus]
                placed[bundle.name] = name
                if bundle.name in layout.on_one_node:
                    placed |= {part.name: name for part in layout.groups[bundle.name]}
                break
        else:
            left = "; ".join(
                f"{n}: {_amount(c, 'CPU')}, {_amount(g, 'GPU')}" for n, (c, g) in free.items()
            )
            raise PlacementError(
                f"layout: {bundle.name} needs {_need(bundle)} on one node; no node has that left "
                f"({left}). {_advice(bundle.role)}"
            )
    return {bundle.name: placed[bundle.name] for bundle in layout.bundles}


def table(layout: Layout, placed: dict[str, str], nodes: Sequence[NodeSupply]) -> str:
    """The layout as text: a line for each actor, then demand against supply."""
    rows = [("actor", "CPUs", "GPUs", "placement group", "node")]
    for group, bundles in layout.groups.items():
        rows += [
            (b.name, f"{b.num_cpus:g}", f"{b.num_gpus:g}", group, placed.get(b.name, "?"))
            for b in bundles
        ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join([*lines, "", demand_against_supply(layout, nodes)])


def demand_against_supply(layout: Layout, nodes: Sequence[NodeSupply]) -> str:
    """One line: what the layout needs and what the nodes have."""
    cpus, gpus = (sum(getattr(node, u) for node in nodes) for u in ("num_cpus", "num_gpus"))
    num_nodes = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}"
    return (
        f"needs {layout.demand('num_cpus'):.4g} CPUs and {layout.demand('num_gpus'):.4g} GPUs; "
        f"{num_nodes} with {cpus:.4g} CPUs and {gpus:.4g} GPUs"
    )


def check_supply(layout: Layout, nodes: Sequence[NodeSupply]) -> None:
    """Refuse what all nodes together could not hold if nobody else had anything of them.

    Raises:
        PlacementError: With demand and supply.
    """
    for unit in _UNITS:
        if layout.demand(unit) > sum(getattr(node, unit) for node in nodes) + _SLACK:
            raise PlacementError(
                f"placement: the layout {demand_against_supply(layout, nodes)}. Ask for fewer, or "
                "use a larger cluster."
            )


class Reservation:
    """Placement groups that are held for a run."""

    def __init__(self, layout: Layout, groups: dict[str, "PlacementGroup"]) -> None:
        self._layout = layout
        self._groups = groups

    def seats(self, role: str) -> "dict[str, Seat]":
        """Actor name -> seat, for all actors of a role."""
        from areal_ray.runtime.fleet import Seat

        return {
            bundle.name: Seat(
                self._groups[group],
                index,
                bundle.num_cpus,
                bundle.num_gpus,
                is_own=_is_own(bundles),
            )
            for group, bundles in self._layout.groups.items()
            for index, bundle in enumerate(bundles)
            if bundle.role == role
        }

    def release(self) -> None:
        """Give everything back; actors that still sit there end."""
        from ray.util.placement_group import remove_placement_group

        for group in self._groups.values():
            remove_placement_group(group)
        self._groups = {}


def give_back(seat: "Seat") -> None:
    """Return what an actor's own placement group held to the cluster; it has to have ended."""
    from ray.util.placement_group import remove_placement_group

    assert seat.is_own, "others sit in that placement group"
    remove_placement_group(seat.group)


def reserve(
    layout: Layout,
    nodes: Sequence[NodeSupply],
    *,
    deadline_s: float,
    check: Callable[[], None] = lambda: None,
) -> Reservation:
    """Hold the placement groups of a layout on the connected cluster.

    Args:
        layout: What to hold.
        nodes: Of the cluster, for messages.
        deadline_s: How long to wait for them.
        check: Called while it waits; what it raises ends the wait.

    Raises:
        PlacementError: they were not there in time; says which, demand, supply, what is free.
    """
    from ray.util.placement_group import placement_group

    token = uuid4().hex[:6]  # runs that share a cluster may share a namespace too
    groups = {
        name: placement_group(
            [_resources(bundle) for bundle in bundles],
            strategy="STRICT_PACK" if name in layout.on_one_node else "PACK",
            name=f"{name}/{token}",
        )
        for name, bundles in layout.groups.items()
    }
    reservation = Reservation(layout, groups)
    end = time.monotonic() + deadline_s
    waiting = list(groups)
    try:
        while waiting:
            check()
            waiting = [
                name
                for name, wait_s in zip(waiting, chain([_LOOK_S], repeat(_GLANCE_S)), strict=False)
                if not groups[name].wait(timeout_seconds=wait_s)
            ]
            if waiting and time.monotonic() > end:
                raise PlacementError(_late(layout, nodes, waiting, deadline_s))
    except BaseException:  # Ctrl-C too: a pending group would block the next run
        reservation.release()
        raise
    return reservation


def _late(
    layout: Layout, nodes: Sequence[NodeSupply], waiting: list[str], deadline_s: float
) -> str:
    import ray

    free = ray.available_resources()
    return (
        f"placement: {', '.join(waiting)} not placed after {deadline_s:g} s; the layout "
        f"{demand_against_supply(layout, nodes)}, of which {free.get('CPU', 0.0):.4g} CPUs and "
        f"{free.get('GPU', 0.0):.4g} GPUs are free. Another job may hold them (`ray status`): "
        "wait for it, or lower rollout.replicas, learner.ranks or their num_cpus and num_gpus."
    )


def _is_own(bundles: Sequence[Bundle]) -> bool:
    return sum(bundle.role != REPLICA_PART for bundle in bundles) == 1


def _resources(bundle: Bundle) -> dict[str, float]:
    gpus = {"GPU": bundle.num_gpus} if bundle.num_gpus else {}
    return {"CPU": bundle.num_cpus, **gpus}


def _bundles(role: str, count: int, num_cpus: float, num_gpus: float = 0.0) -> list[Bundle]:
    return [Bundle(f"{role}-{i}", role, _cpus(num_cpus), num_gpus) for i in range(count)]


def single_bundle(name: str, role: str, num_cpus: float) -> Bundle:
    """Of an actor that has nothing but CPU cores."""
    return Bundle(name, role, _cpus(num_cpus))


def replica_bundles(name: str, role: str, rollout: RolloutConfig) -> tuple[Bundle, ...]:
    """The actor, and where its model is split over GPUs a bundle for each part after it."""
    split = rollout.tensor_parallel
    if split == 1:
        return (Bundle(name, role, _cpus(rollout.num_cpus), rollout.num_gpus),)
    parts = (Bundle(f"{name}/{i}", REPLICA_PART, _LEAST_CPUS, 1.0) for i in range(split))
    return (Bundle(name, role, _cpus(rollout.num_cpus)), *parts)


def _units(layout: Layout) -> Iterator[Bundle]:
    """What has to be placed as one: single bundles, and groups on one node summed up."""
    for name, bundles in layout.groups.items():
        if name in layout.on_one_node:
            cpus, gpus = (sum(getattr(b, unit) for b in bundles) for unit in _UNITS)
            yield Bundle(name, bundles[0].role, cpus, gpus)
        else:
            yield from bundles


def _cpus(num_cpus: float) -> float:
    return max(num_cpus, _LEAST_CPUS)


def _check_nodes(nodes: Sequence[NodeSupply], cluster: ClusterConfig) -> None:
    if len(nodes) < cluster.n_nodes:
        raise PlacementError(
            f"cluster.n_nodes: is {cluster.n_nodes}; the cluster has {len(nodes)}. "
            "Add nodes, or lower it."
        )
    fit = [node for node in nodes if node.num_gpus + _SLACK >= cluster.n_gpus_per_node]
    if len(fit) < cluster.n_nodes:
        most = max((node.num_gpus for node in nodes), default=0.0)
        raise PlacementError(
            f"cluster.n_gpus_per_node: is {cluster.n_gpus_per_node} on n_nodes = "
            f"{cluster.n_nodes}; {len(fit)} of the cluster's {len(nodes)} nodes have that many "
            f"(the most is {most:g}). Lower it and the num_gpus of rollout and learner."
        )


def _too_much(layout: Layout, nodes: Sequence[NodeSupply], unit: str, word: str) -> str:
    by_role: dict[str, list[float]] = {}
    for bundle in layout.bundles:
        if getattr(bundle, unit):
            by_role.setdefault(bundle.role, []).append(getattr(bundle, unit))
    shares = ", ".join(f"{role} {len(each)} x {each[0]:g}" for role, each in by_role.items())
    supply = sum(getattr(node, unit) for node in nodes)
    largest = max(by_role, key=lambda role: sum(by_role[role]))
    return (
        f"layout: needs {layout.demand(unit):.4g} {word} ({shares}); the cluster has "
        f"{supply:.4g}. {_advice(largest, unit)}"
    )


def _advice(role: str, unit: str = "num_cpus") -> str:
    section = {EVALUATION: "rollout", REPLICA_PART: "rollout", EVALUATION_AGENT: "agent"}.get(
        role, role
    )
    if section == PARAM_SYNC:
        return "Add CPUs."
    count = "ranks" if section == "learner" else "replicas"
    return f"Lower {section}.{count} or {section}.{unit}, or use a larger cluster."


def _need(bundle: Bundle) -> str:
    cpus = _amount(bundle.num_cpus, "CPU")
    return f"{cpus} and {_amount(bundle.num_gpus, 'GPU')}" if bundle.num_gpus else cpus


def _amount(count: float, word: str) -> str:
    return f"{count:.4g} {word}{'' if count == 1 else 's'}"
