"""Whole runs that sample from an SGLang server, played by the scripted one."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.sglang_server import scripted_server
from tests.support.whole_runs import (
    Runs,
    assert_books_balance,
    episodes_of,
    events_of,
    staleness_of,
)


def test_a_run_trains_on_what_a_server_samples_and_publishes_into_it(runs: Runs) -> None:
    with scripted_server(runs.folder / "tiny") as server:
        engine = f"{{kind: sglang, url: '{server.url}', max_context_tokens: 128}}"
        summary = runs.run("on-sglang", f"rollout.engine={engine}", "steps=2")
        live = dict(server.brain.model.named_parameters())
    assert (summary.steps, summary.publish.count, server.version) == (2, 2, "2")
    folder = runs.folder / "on-sglang"
    assert assert_books_balance(folder)["trained"] == 8
    assert max(set().union(*map(staleness_of, episodes_of(folder)))) <= 2
    trained = load_file(folder / "model" / "model.safetensors")
    for name, tensor in trained.items():
        torch.testing.assert_close(live[name].data, tensor, rtol=0, atol=0)


@pytest.mark.extended
def test_a_replica_whose_server_refuses_an_update_starts_anew_at_once(runs: Runs) -> None:
    with scripted_server(runs.folder / "tiny") as server:
        load = server._on_update_weights_from_disk
        refused: list[str] = []

        async def refuse_the_second(body: dict[str, Any]) -> Any:
            if body["weight_version"] == "2" and not refused:
                refused.append(body["weight_version"])
                raise ValueError("no room for it")
            return await load(body)

        server._on_update_weights_from_disk = refuse_the_second  # type: ignore[method-assign]
        engine = f"{{kind: sglang, url: '{server.url}', max_context_tokens: 128}}"
        summary = runs.run("update-refused", f"rollout.engine={engine}", "steps=4")
    assert refused
    assert (summary.outcome, summary.steps, server.version) == ("finished", 4, "4")
    folder = runs.folder / "update-refused"
    assert assert_books_balance(folder)["trained"] == 16
    assert "rollout-0 ended itself" in events_of(folder) or "had ended itself" in events_of(folder)
    assert "version 2 is not loaded" in events_of(folder)
    assert "no room for it" in events_of(folder)
