"""The gateway's own OpenAPI, and what schemathesis makes of it: requests of every kind."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings

from tests.support.scripted_sampler import Said
from tests.support.sessions import ADMIN_KEY, Replica, serving_sessions

PATHS = {
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/v1/models"),
    *("/v1/responses/input_tokens", "/v1/messages/count_tokens", "/health"),
    *("/rl/start_session", "/rl/set_reward", "/rl/end_session", "/export_trajectories"),
}
MODES = ("POSITIVE", "NEGATIVE")
"""Requests that the description allows, and others."""
ANSWER_S = 20.0
READ = {"/v1/models", "/health"}
UNKNOWN = {"/rl/set_reward", "/rl/end_session", "/export_trajectories"}
"""They name a session, which nobody guesses."""


@dataclass
class Served:
    """A gateway with sessions in a thread of its own."""

    replica: Replica
    session_key: str = ""
    statuses: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Come so far, by path."""

    def key_for(self, path: str) -> str:
        """Of a session for model calls, else of the admin."""
        return self.session_key if path.startswith("/v1/") else ADMIN_KEY

    def start(self) -> str:
        """The key of a new session."""
        body = {"task_id": "t"}
        auth = {"authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self.replica.url}/rl/start_session"
        key: str = requests.post(url, json=body, headers=auth, timeout=ANSWER_S).json()["api_key"]
        return key


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    made: list[Replica] = []
    is_up, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        folder = tmp_path_factory.mktemp("sessions")
        async with serving_sessions(folder, [Said("two")]) as replica:
            for _ in range(200):
                replica.sessions.open_slot()
            made.append(replica)
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert is_up.wait(30)
    told = Served(made[0])
    told.session_key = told.start()
    yield told
    loop.call_soon_threadsafe(is_over.set)
    thread.join(30)
    assert not thread.is_alive()
    assert made[0].service.counts.num_defects == 0
    assert made[0].service.counts.num_open == 0


def test_every_route_is_described_with_its_body_and_its_answers(served: Served) -> None:
    told = requests.get(f"{served.replica.url}/openapi.json", timeout=ANSWER_S).json()
    assert set(told["paths"]) == PATHS
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            if path != "/health":
                assert operation["security"] == [{"bearer": []}, {"x-api-key": []}]
                assert "4XX" in operation["responses"]
                assert ("requestBody" in operation) == (method == "post")


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(("GET", path, "POSITIVE") for path in sorted(READ)),
        *(("POST", path, mode) for path in sorted(PATHS - READ) for mode in MODES),
    ],
)
def test_whatever_is_asked_is_answered_as_described(
    served: Served, api: Any, method: str, path: str, mode: str
) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    cases = api[path][method].as_strategy(generation_mode=GenerationMode[mode])

    @settings(max_examples=8, suppress_health_check=list(HealthCheck))
    @given(cases)
    def ask(case: Any) -> None:
        auth = {"authorization": f"Bearer {served.key_for(path)}"}
        answer = case.call(headers=auth, timeout=ANSWER_S)
        case.validate_response(
            answer,
            checks=[
                not_a_server_error,
                checks.content_type_conformance,
                checks.status_code_conformance,
                checks.response_schema_conformance,
            ],
        )
        served.statuses[path].add(answer.status_code)

    ask()
    if mode == "POSITIVE" and path not in UNKNOWN:
        assert 200 in served.statuses[path], "nothing that the description allows was answered"


@pytest.fixture(scope="module")
def api(served: Served) -> Any:
    """What schemathesis makes of the description."""
    schemathesis = pytest.importorskip(
        "schemathesis", reason="schemathesis is not installed: pip install 'areal-ray[dev]'"
    )
    return schemathesis.openapi.from_url(f"{served.replica.url}/openapi.json")
