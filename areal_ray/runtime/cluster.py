"""Connecting to a Ray cluster, or starting one here; what it has; the environment Ray reads.

connect waits for the cluster's head and for cluster.n_nodes nodes; bounded by deadlines.nodes_s.
"""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_ray.errors import PlacementError
from areal_ray.runtime.placement import NodeSupply
from areal_ray.runtime.run_config import ClusterConfig, DeadlinesConfig, SchedulerConfig
from areal_ray.telemetry.log import secret_values

RAY_SERIES = "2.60"
"""The Ray this is written for: major and minor version."""

_PROBE_S = 10.0
_forking = threading.local()

_LOCAL_ENV = {
    # Workers run at niceness 15 otherwise: anything else on the machine would starve the engines.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
}


_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RECONNECT_S = 60.0
"""After so long without its head Ray ends a process."""


def head_patience_s() -> float:
    """How long a run bears with a head that does not answer: half of what Ray does, since a run
    takes its time to end in order."""
    try:
        return float(os.environ.get(_RECONNECT, _RECONNECT_S)) / 2
    except ValueError:  # Ray itself says so
        return _RECONNECT_S / 2


@dataclass(frozen=True, slots=True)
class Connection:
    """A driver's hold on a cluster."""

    nodes: tuple[NodeSupply, ...]
    is_started_here: bool
    """Whether closing it ends the cluster."""
    is_connected_here: bool
    """Whether closing it disconnects: not where the caller was connected before."""

    def close(self) -> None:
        """Disconnect; end a Ray that was started for the run."""
        import ray

        if self.is_connected_here:
            ray.shutdown()


def address_of(cluster: ClusterConfig, scheduler: SchedulerConfig) -> str | None:
    """The cluster to join; None = start one on this machine."""
    named = cluster.address or os.environ.get("RAY_ADDRESS")
    return named or ("auto" if scheduler.type == "ray" else None)


def what_connect_does(cluster: ClusterConfig, scheduler: SchedulerConfig) -> str:
    """A line for whoever waits for it."""
    address = address_of(cluster, scheduler)
    return "starting Ray ..." if address is None else f"joining the Ray at {address} ..."


def connect(
    cluster: ClusterConfig,
    scheduler: SchedulerConfig,
    deadlines: DeadlinesConfig,
    check: Callable[[], None] = lambda: None,
) -> Connection:
    """Join the cluster that the recipe or RAY_ADDRESS names, or start a Ray here.

    `check` is called while it waits for nodes; what it raises ends the wait.

    Raises:
        PlacementError: no cluster there, another Ray version, or too few nodes in time.
    """
    import ray

    check_ray_version(ray.__version__)
    if ray.is_initialized():
        return Connection(tuple(_wait_for_nodes(cluster, deadlines, check)), False, False)
    address = address_of(cluster, scheduler)
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "include_dashboard": False if address is None else None,
    }
    if address is None:
        for name, value in _LOCAL_ENV.items():
            os.environ.setdefault(name, value)
        options |= {
            "num_cpus": cluster.num_cpus,
            "object_store_memory": cluster.object_store_bytes,
        }
    else:
        _check_address(address)
    start_or_join(address, options)
    _mute()
    try:
        nodes = _wait_for_nodes(cluster, deadlines, check)
    except BaseException:
        ray.shutdown()
        raise
    return Connection(tuple(nodes), is_started_here=address is None, is_connected_here=True)


def start_or_join(address: str | None, options: Mapping[str, Any]) -> None:
    """ray.init; a Ray of our own gets a second try, since it gives a busy machine 30 s only.

    Args:
        address: The cluster to join; None = start one here, whatever else runs on the machine.
        options: Further arguments of ray.init.

    Raises:
        PlacementError: It did not start, or no cluster is there.
    """
    import ray

    tries = 2 if address is None else 1
    for attempt in range(1, tries + 1):
        try:
            with _groups_of_their_own():
                ray.init(address=address or "local", **options)
        except Exception as error:  # Ray raises a bare Exception where a node is slow to start
            ray.shutdown()
            if attempt == tries:
                raise PlacementError(_why_not(error, address)) from error
        else:
            return


@contextmanager
def _groups_of_their_own() -> Iterator[None]:
    """Processes that this thread starts meanwhile leave our process group.

    A signal to the whole group (Ctrl-C, `timeout`, a batch system) is ours to answer: we stop in
    order, and need Ray for it. Ray's processes still end with us, however we end.
    """
    _forking.is_apart = True
    try:
        yield
    finally:
        _forking.is_apart = False


def _leave_group() -> None:
    # The command line blocks them for itself; a child (Ray, a data source's pool) is ended by them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    if getattr(_forking, "is_apart", False):
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)


def _mute() -> None:
    """Keep Ray's node messages out of the console; the run tells of lost actors itself.

    Ray prints a paragraph for each dead process and slow start into every driver, whatever
    log_to_driver says. This ends the thread that does, the way ray.shutdown() ends it.
    """
    from ray._private.worker import global_worker

    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()


def _check_address(address: str) -> None:
    """Refuse what no head listens at: Ray itself would retry for minutes."""
    if "://" in address:
        raise PlacementError(
            f"cluster.address: is {address!r}; must be host:port of the head, or auto. A dashboard "
            "is reached by `ray job submit -- areal-ray train ...`, Ray Client is not supported."
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # auto, or a name that Ray itself resolves
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise PlacementError(_why_not(error, address)) from error


def environment_secrets() -> frozenset[str]:
    """Values of this process's environment that must not reach a file: keys, tokens, passwords."""
    return secret_values(os.environ)


def own_environment() -> Mapping[str, str]:
    """Of this process, for who hands a part of it on."""
    return os.environ


def check_ray_version(version: str) -> None:
    """Refuse a Ray that this was not written for, before it fails in some obscure way."""
    if not version.startswith(RAY_SERIES + "."):
        raise PlacementError(
            f"ray: version {version} is installed; must be {RAY_SERIES}.*. "
            f"pip install 'ray[default]=={RAY_SERIES}.*'"
        )


def machine_nodes(cluster: ClusterConfig) -> list[NodeSupply]:
    """What a Ray started on this machine would have; needs no Ray."""
    cpus = cluster.num_cpus or len(os.sched_getaffinity(0))
    gpus = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").iterdir())
    return [NodeSupply("this machine", float(cpus), float(gpus))]


def cluster_nodes() -> list[NodeSupply]:
    """What the nodes of the connected cluster have."""
    import ray

    return [
        NodeSupply(
            f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}",
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _wait_for_nodes(
    cluster: ClusterConfig, deadlines: DeadlinesConfig, check: Callable[[], None]
) -> list[NodeSupply]:
    end = time.monotonic() + deadlines.nodes_s
    while True:
        check()
        nodes = cluster_nodes()
        if len(nodes) >= cluster.n_nodes:
            return nodes
        if time.monotonic() > end:
            raise PlacementError(
                f"cluster.n_nodes: is {cluster.n_nodes}; {len(nodes)} came within "
                f"deadlines.nodes_s = {deadlines.nodes_s:g} s. Add nodes, or lower it."
            )
        time.sleep(min(1.0, deadlines.nodes_s / 10))


def _why_not(error: Exception, address: str | None) -> str:
    text = str(error.__cause__ or error)
    where = f"the Ray cluster at {address!r}" if address else "a Ray on this machine"
    versions = re.findall(r"(Ray|Python): ([\w.+]+)", text)
    if "ersion mismatch" in text and versions:
        told = ", ".join(f"{name} {version}" for name, version in versions)
        return (
            f"cluster: {where} runs other versions than this driver ({told}; cluster first). "
            "Both must be the same. Use the cluster's image, or one environment for both."
        )
    if address is not None and "InvalidAuthToken" in text:
        return (
            f"cluster.address: {where} asks for a token. Set RAY_AUTH_MODE=token, with the token "
            "of its `ray start` in ~/.ray/auth_token or RAY_AUTH_TOKEN."
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if address is not None:
        return (
            f"cluster.address: {where} does not answer ({first[:160]}). Start it with "
            "`ray start --head`, or unset RAY_ADDRESS and use scheduler.type=local."
        )
    return (
        f"cluster: {where} could not be started ({first[:160]}). Try again when it is less busy, "
        "or look at the newest session in Ray's folder (/tmp/ray)."
    )
