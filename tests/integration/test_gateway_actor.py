"""A gateway as an actor in front of real rollout replicas: answers, keys, and its restart."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from areal_ray.engines.protocols import SamplingConfig
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.gateway.keys import hash_key
from areal_ray.runtime.gateway_config import EngineFacts, GatewayConfig
from areal_ray.runtime.rollout_config import RolloutConfig
from tests.support.tiny_models import write_tiny_model
from tests.support.whole_runs import until

HELLO = [{"role": "user", "content": "What is 12 plus 30?"}]
KEY = "a-key-of-this-test"


class Stage:
    """One rollout replica and a gateway in front of it."""

    def __init__(self, folder: Path) -> None:
        import ray

        from areal_ray.runtime.gateway_actor import GatewayActor
        from areal_ray.runtime.rollout_actor import RolloutActor

        self.ray = ray
        model = str(write_tiny_model(folder / "model"))
        rollout = RolloutConfig(engine=TorchGenerationConfig(max_context_tokens=256))
        self.rollout = (
            ray.remote(RolloutActor)
            .options(num_cpus=0)
            .remote("rollout-0", model, rollout, version=0)
        )
        self.gateway = (
            ray.remote(GatewayActor)
            .options(num_cpus=0, max_restarts=-1)
            .remote(
                "gateway-0",
                model_path=model,
                config=GatewayConfig(),
                sampling=SamplingConfig(max_new_tokens=24),
                replicas={"rollout-0": self.rollout},
                folder=str(folder),
                key_hash=hash_key(KEY),
                engine=EngineFacts(context_tokens=256),
            )
        )

    def health(self) -> Any:
        return self.ray.get(self.gateway.health.remote(), timeout=120)

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.health().url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def stage(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("gateway"))
    yield made
    for actor in (made.gateway, made.rollout):
        made.ray.kill(actor, no_restart=True)


def test_a_stream_over_the_fleet_says_what_the_whole_reply_says(stage: Stage) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": HELLO, "temperature": 0, "seed": 3}
    with stage.client() as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(stream=True, **asked))
    told = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(told) == whole.choices[0].message.content
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 24
    assert len([piece for piece in told if piece]) > 1
    assert stage.health().num_calls == 2


def test_only_who_has_the_key_is_let_in(stage: Stage) -> None:
    with stage.client("another-key") as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="policy", messages=HELLO)


def test_a_killed_gateway_listens_on_the_same_port_again(stage: Stage) -> None:
    before = stage.health()
    pid = stage.ray.get(stage.gateway.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGKILL)

    def back() -> Any:
        try:
            return stage.health()
        except stage.ray.exceptions.RayError:
            return None

    after = until(back, "the gateway's return")
    assert after.incarnation != before.incarnation
    assert after.url == before.url
    with stage.client() as client:
        assert client.chat.completions.create(model="policy", messages=HELLO).choices
