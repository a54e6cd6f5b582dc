"""The ways that weights travel: memory of the same node, the wire, the object store, files."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors import safe_open

from areal_ray.errors import PublishError
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.weight_files import WeightFile, prepare_folder
from areal_ray.runtime.weights_config import WeightsConfig
from tests.support.weight_actors import TINY, LearnerStandIn, ReplicaStandIn, tensors
from tests.support.weight_crew import PATIENCE_S, WeightCrew, answer, assert_live

pytestmark = pytest.mark.usefixtures("ray_session")

BROAD = {"embed": (256, 1024), "bias": (3,), "head": (1024, 512)}
"""3 MB in 48 buckets of 64 KiB."""


@pytest.fixture(scope="module")
def crew(ray_session: None) -> Iterator[WeightCrew]:
    with WeightCrew(3, shapes=BROAD, bucket_bytes=65536) as crew:
        yield crew


@pytest.mark.parametrize("elsewhere", [(), ("rollout-1",), ("rollout-0", "rollout-1", "rollout-2")])
def test_replicas_read_the_learners_memory_and_those_on_other_nodes_take_the_wire(
    crew: WeightCrew, elsewhere: tuple[str, ...]
) -> None:
    for name, replica in crew.replicas.items():
        ray.get(replica.move.remote(name in elsewhere))
    crew.enlist()
    for version in (crew.version() + 1, crew.version() + 2, crew.version() + 3):
        report = crew.publish(version)
        assert report.quarantined == {}
        for name, replica in crew.replicas.items():
            crew.assert_holds(name, version)
            assert ray.get(replica.reads_memory.remote()) == (name not in elsewhere)


def test_memory_is_shared_only_where_the_recipe_lets_it(crew: WeightCrew) -> None:
    config = WeightsConfig(timeout_s=20.0, bucket_bytes=65536, shares_memory=False)
    sync = crew.spawn(ParamSyncActor, config)
    ray.get(sync.set_members.remote(crew.learner, crew.replicas), timeout=30)
    ray.get(crew.learner.train.remote(9), timeout=30)
    ray.get(sync.publish.remote(1), timeout=60)
    for replica in crew.replicas.values():
        assert not ray.get(replica.reads_memory.remote())
        assert_live(replica, 1, tensors(BROAD, 9))


class ChangeCrew:
    """The crew's replicas, as on other nodes, with a learner of their own that changes little."""

    def __init__(self, crew: WeightCrew, full_every: int) -> None:
        self._replicas = crew.replicas
        config = {"bucket_bytes": 65536, "shares_memory": False, "full_every": full_every}
        self._sync = crew.spawn(ParamSyncActor, WeightsConfig(timeout_s=20.0, **config))
        self._learner = crew.spawn(LearnerStandIn, BROAD)
        self._expected = tensors(BROAD, 0)
        ray.get(self._sync.set_members.remote(self._learner, crew.replicas), timeout=60)

    def publish(self, version: int) -> Any:
        """Change an element in each of three buckets, publish, and look at every replica's bits."""
        for name, index, value in (("bias", 1, -0.0), ("embed", 9, math.nan), ("head", -1, 0.5)):
            ray.get(self._learner.nudge.remote(name, index, value * version), timeout=30)
            self._expected[name].view(-1)[index] = value * version
        report = ray.get(self._sync.publish.remote(version), timeout=60)
        for name in report.replicas:
            assert_bits(self._replicas[name], version, self._expected)
        return report


def test_only_what_changed_takes_the_wire_and_every_third_version_is_whole(
    crew: WeightCrew,
) -> None:
    changes, everyone = ChangeCrew(crew, full_every=3), tuple(crew.replicas)
    damaged = crew.replicas["rollout-1"]
    assert changes.publish(1).replicas == everyone
    ray.get(damaged.damage.remote("embed"), timeout=30)
    # What changed was put over memory that was not the version before: its digest tells.
    report = changes.publish(2)
    assert report.replicas == ("rollout-0", "rollout-2")
    assert "digests differ" in report.quarantined["rollout-1"]
    version = 3
    while changes.publish(version).replicas != everyone:
        version += 1
        time.sleep(0.3)
    # Back in a group of a fresh name, which began with a whole version.
    assert changes.publish(version + 1).replicas == everyone
    assert changes.publish(version + 2).replicas == everyone
    ray.get(damaged.damage.remote("embed"), timeout=30)
    assert changes.publish(version + 3).replicas == everyone  # a whole one again
    # A bit flips in the counts themselves: nobody waits for bytes that do not come.
    ray.get(damaged.fail_at.remote("flip"), timeout=30)
    report = changes.publish(version + 4)
    assert report.replicas == ("rollout-0", "rollout-2")
    assert "differ from their digest" in report.quarantined["rollout-1"]


@pytest.mark.extended
def test_a_replica_restarted_between_two_changes_is_sent_a_whole_version_first(
    ray_session: None,
) -> None:
    fields = {"bucket_bytes": 65536, "shares_memory": False, "full_every": 1000}
    expected = tensors(BROAD, 0)
    with WeightCrew(2, shapes=BROAD, **fields) as crew:

        def publish(version: int) -> None:
            expected["head"].view(-1)[version] = float(version)
            ray.get(crew.learner.nudge.remote("head", version, float(version)), timeout=60)
            report = ray.get(crew.sync.publish.remote(version), timeout=60)
            assert (report.replicas, report.quarantined) == (tuple(crew.replicas), {})
            for replica in crew.replicas.values():
                assert_live(replica, version, expected)

        for version in (1, 2, 3):
            publish(version)
        back = crew.replicas["rollout-1"]
        old = answer(back.incarnation)
        ray.kill(back, no_restart=False)
        end = time.monotonic() + PATIENCE_S
        while answer(back.incarnation) == old:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert_live(back, 3, expected)
        # It holds no base any more: what changed alone would be refused, and name it.
        for version in (4, 5, 6):
            publish(version)


def assert_bits(replica: Any, version: int, expected: dict[str, torch.Tensor]) -> None:
    """As assert_live, where a NaN is equal to itself and a negative zero is not zero."""
    bits = {name: tensor.view(torch.int32) for name, tensor in expected.items()}
    held, live = ray.get(replica.live.remote(), timeout=30)
    assert held == version
    assert all(torch.equal(live[name].view(torch.int32), bits[name]) for name in bits)


class FileCrew:
    """A learner that publishes through files, and one replica."""

    def __init__(self, crew: WeightCrew, folder: Path) -> None:
        self._crew = crew
        self.folder = folder
        prepare_folder(folder)
        config = WeightsConfig(transport="disk", timeout_s=20.0, bucket_bytes=64)
        self.sync = crew.spawn(ParamSyncActor, config)
        self.learner = crew.spawn(LearnerStandIn, TINY, "float32", str(folder))
        self.replica = self.joiner()
        members = {"replica": self.replica}
        for member in (self.learner, self.replica):
            crew.pid(member)  # has started
        ray.get(self.sync.set_members.remote(self.learner, members), timeout=60)

    def joiner(self) -> Any:
        """A further replica, which catches up as it starts."""
        return self._crew.spawn(ReplicaStandIn, TINY, self.sync)

    def version(self) -> int:
        """The committed one."""
        return ray.get(self.sync.version.remote(), timeout=60)

    def publish(self) -> int:
        """Publish weights that tell the version; the version."""
        version = self.version() + 1
        ray.get(self.learner.train.remote(version), timeout=60)
        assert ray.get(self.sync.publish.remote(version), timeout=60).replicas == ("replica",)
        assert_live(self.replica, version, tensors(TINY, version))
        return version

    def file(self, version: int) -> Path:
        """Where a version lies."""
        return self.folder / f"version-{version:06d}.safetensors"

    def files(self) -> list[Path]:
        """What lies in the folder."""
        return sorted(self.folder.iterdir())


@pytest.fixture(scope="module")
def on_disk(crew: WeightCrew, tmp_path_factory: pytest.TempPathFactory) -> FileCrew:
    return FileCrew(crew, tmp_path_factory.mktemp("run") / "weights")


def test_versions_travel_in_files_and_old_ones_go(on_disk: FileCrew) -> None:
    last = [on_disk.publish() for _ in range(3)][-1]
    assert on_disk.files() == [on_disk.file(last - 1), on_disk.file(last)]
    with safe_open(on_disk.file(last), "pt") as opened:
        assert torch.equal(opened.get_tensor("head"), tensors(TINY, last)["head"])


def test_a_full_disk_ends_the_publish_with_its_name_and_changes_nothing(on_disk: FileCrew) -> None:
    version = on_disk.publish()
    before = on_disk.files()
    # The kernel's own full device, under the name that the file is written as.
    file = on_disk.file(version + 1)
    file.with_name(file.name + ".partial").symlink_to("/dev/full")
    with pytest.raises(PublishError, match=rf"{file.name}.*No space left.*stays {version}"):
        on_disk.publish()
    assert_live(on_disk.replica, version, tensors(TINY, version))
    assert on_disk.files() == before
    assert on_disk.publish() == version + 1


def test_a_mount_that_goes_away_is_named(on_disk: FileCrew) -> None:
    on_disk.publish()
    gone = on_disk.folder.with_name("elsewhere")
    on_disk.folder.rename(gone)
    with pytest.raises(PublishError, match=r"weights does not exist on .*every node mounts"):
        on_disk.publish()
    gone.rename(on_disk.folder)
    on_disk.publish()


def test_a_late_joiner_reads_the_committed_file_also_without_the_learner(
    on_disk: FileCrew,
) -> None:
    version = on_disk.publish()
    ray.get(on_disk.learner.train.remote(version + 7), timeout=30)
    ray.kill(on_disk.learner)
    committed = ray.get(on_disk.sync.committed.remote(), timeout=30)
    assert committed.snapshot == (WeightFile(str(on_disk.file(version)), version),)
    assert_live(on_disk.joiner(), version, tensors(TINY, version))
    # From here on the file is damaged.
    content = bytearray(on_disk.file(version).read_bytes())
    content[-1] ^= 1
    on_disk.file(version).write_bytes(content)
    load = on_disk.replica.weights_load.remote(committed.plan, version, committed.snapshot)
    with pytest.raises(PublishError, match="differs from its digest"):
        ray.get(load, timeout=30)


@pytest.mark.parametrize("transport", ["collective", "object_store"])
def test_a_replica_that_starts_amid_publishes_holds_one_version_whole(
    crew: WeightCrew, transport: str
) -> None:
    config = WeightsConfig(timeout_s=20.0, bucket_bytes=65536, transport=transport)
    sync, learner = crew.spawn(ParamSyncActor, config), crew.spawn(LearnerStandIn, BROAD)
    ray.get(sync.set_members.remote(learner, crew.replicas), timeout=60)
    late, version = None, 0
    while late is None or version < 12:
        version += 1
        ray.get(learner.train.remote(version), timeout=30)
        publishing = sync.publish.remote(version)
        if version == 2:
            late = crew.spawn(ReplicaStandIn, BROAD, sync)
            alive = late.pid.remote()
        ray.get(publishing, timeout=60)
        if late is not None and ray.wait([alive], timeout=0)[0]:
            break
    ray.get(alive, timeout=60)
    held = ray.get(late.live.remote(), timeout=30)[0]
    assert 1 <= held <= version
    assert_live(late, held, tensors(BROAD, held))
    ray.get(sync.set_members.remote(learner, {**crew.replicas, "late": late}), timeout=30)
    ray.get(learner.train.remote(version + 1), timeout=30)
    report = ray.get(sync.publish.remote(version + 1), timeout=60)
    assert "late" in report.replicas
    assert_live(late, version + 1, tensors(BROAD, version + 1))
