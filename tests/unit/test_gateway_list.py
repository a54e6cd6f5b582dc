"""The list of a run's gateways, over its resumption."""

from areal_ray.gateway.peers import Peers
from areal_ray.runtime.gateway_list import GatewayList, address_file, left_behind


def test_gateways_of_an_earlier_part_are_known_before_they_listen_again_and_start_nothing(tmp_path):
    for name in ("0", "1", "10", "2"):
        address_file(tmp_path, name).write_text(f"http://{name}")
    assert left_behind(tmp_path, 2) == ["2", "10"]
    GatewayList.anew(tmp_path, 1).write(tmp_path)
    peers = GatewayList.read(tmp_path, 1).peers(tmp_path)
    assert set(peers.urls) == {"0", "1", "2", "10"}
    assert peers.leaving == {"1", "2", "10"}
    keys = [f"deployed-agent-number-{number:03}" for number in range(50)]
    assert {peers.home(key) for key in keys} == {peers.successor(key) for key in keys} == {"0"}


def test_a_run_that_begins_anew_has_its_own_gateways_alone(tmp_path):
    assert GatewayList.anew(tmp_path, 2) == GatewayList.of(2) == GatewayList.read(tmp_path, 2)
    assert GatewayList.anew(tmp_path, 1).peers(tmp_path) == Peers()
