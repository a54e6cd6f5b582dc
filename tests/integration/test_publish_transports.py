"""The ways that weights travel: memory of the same node, the wire, the object store, files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors import safe_open

from areal_ray.errors import PublishError
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.weight_files import WeightFile, prepare_folder
from areal_ray.runtime.weights_config import WeightsConfig
from tests.support.weight_actors import TINY, LearnerStandIn, ReplicaStandIn, tensors
from tests.support.weight_crew import WeightCrew, assert_live

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


class FileCrew:
    """A learner that publishes through files, and one replica."""

    def __init__(self, crew: WeightCrew, folder: Path) -> None:
        self._crew = crew
        self._config = WeightsConfig(transport="disk", timeout_s=20.0, bucket_bytes=64)
        self.folder = folder
        prepare_folder(folder)
        self.sync = crew.spawn(ParamSyncActor, self._config)
        self.learner = crew.spawn(LearnerStandIn, TINY, "float32", str(folder))
        self.replica = self.late_joiner()
        members = {"replica": self.replica}
        ray.get(self.sync.set_members.remote(self.learner, members), timeout=60)

    def late_joiner(self) -> Any:
        replica = self._crew.spawn(ReplicaStandIn, TINY, self.sync)
        self._crew.pid(replica)  # has started
        return replica

    def publish(self, version: int) -> Any:
        ray.get(self.learner.train.remote(version), timeout=60)
        return ray.get(self.sync.publish.remote(version), timeout=60)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def on_disk(crew: WeightCrew, tmp_path: Path) -> FileCrew:
    return FileCrew(crew, tmp_path / "weights")


def test_versions_travel_in_files_and_old_ones_go(on_disk: FileCrew) -> None:
    for version in (1, 2, 3):
        report = on_disk.publish(version)
        assert report.replicas == ("replica",)
        assert_live(on_disk.replica, version, tensors(TINY, version))
    assert on_disk.files() == ["version-000002.safetensors", "version-000003.safetensors"]
    with safe_open(on_disk.folder / "version-000003.safetensors", "pt") as opened:
        assert (opened.get_tensor("head") == tensors(TINY, 3)["head"]).all()


def test_a_late_joiner_reads_the_committed_file_also_without_the_learner(
    on_disk: FileCrew,
) -> None:
    on_disk.publish(1)
    ray.get(on_disk.learner.train.remote(8))
    ray.kill(on_disk.learner)
    committed = ray.get(on_disk.sync.committed.remote(), timeout=30)
    assert committed.snapshot == (
        WeightFile(str(on_disk.folder / "version-000001.safetensors"), 1),
    )
    assert_live(on_disk.late_joiner(), 1, tensors(TINY, 1))


def test_a_full_disk_ends_the_publish_with_its_name_and_changes_nothing(on_disk: FileCrew) -> None:
    on_disk.publish(1)
    # The kernel's own full device, under the name that the file is written as.
    (on_disk.folder / "version-000002.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(PublishError, match=r"version-000002.*No space left.*stays 1"):
        on_disk.publish(2)
    assert_live(on_disk.replica, 1, tensors(TINY, 1))
    assert on_disk.files() == ["version-000001.safetensors"]
    on_disk.publish(2)
    assert_live(on_disk.replica, 2, tensors(TINY, 2))


def test_a_mount_that_goes_away_is_named(on_disk: FileCrew) -> None:
    on_disk.publish(1)
    gone = on_disk.folder.with_name("elsewhere")
    on_disk.folder.rename(gone)
    with pytest.raises(PublishError, match=r"weights does not exist on .*every node mounts"):
        on_disk.publish(2)
    gone.rename(on_disk.folder)
    on_disk.publish(2)
    assert_live(on_disk.replica, 2, tensors(TINY, 2))


def test_a_damaged_file_is_refused_by_who_would_load_it(
    on_disk: FileCrew, crew: WeightCrew
) -> None:
    on_disk.publish(1)
    file = on_disk.folder / "version-000001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    committed = ray.get(on_disk.sync.committed.remote(), timeout=30)
    load = on_disk.replica.weights_load.remote(committed.plan, 1, committed.snapshot)
    with pytest.raises(PublishError, match=r"version-000001.*differs from its digest"):
        ray.get(load, timeout=30)


@pytest.mark.parametrize("transport", ["collective", "object_store"])
def test_a_replica_that_starts_amid_publishes_holds_one_version_whole(
    crew: WeightCrew, transport: str
) -> None:
    config = WeightsConfig(timeout_s=20.0, bucket_bytes=65536, transport=transport)
    sync = crew.spawn(ParamSyncActor, config)
    ray.get(sync.set_members.remote(crew.learner, crew.replicas), timeout=30)
    late, version = None, 0
    while late is None or version < 12:
        version += 1
        ray.get(crew.learner.train.remote(version), timeout=30)
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
    ray.get(sync.set_members.remote(crew.learner, {**crew.replicas, "late": late}), timeout=30)
    ray.get(crew.learner.train.remote(version + 1), timeout=30)
    report = ray.get(sync.publish.remote(version + 1), timeout=60)
    assert "late" in report.replicas
    assert_live(late, version + 1, tensors(BROAD, version + 1))
