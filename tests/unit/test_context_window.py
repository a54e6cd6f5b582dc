"""Agents and engines agree on how wide a model's context window is."""

import json

import pytest

from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.gateway.template import model_context_tokens
from tests.support.tiny_models import write_tiny_model

SLIDING = {"sliding_window": 48, "max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("family", "fields", "window"),
    [
        ("qwen3", {"max_position_embeddings": 256}, 256),
        ("qwen3", {"max_position_embeddings": 32768}, 8192),
        ("mistral", SLIDING, 48),
        ("mistral", {**SLIDING, "sliding_window": None}, 256),
        ("qwen2", {**SLIDING, "use_sliding_window": False}, 256),
        ("qwen2", {**SLIDING, "use_sliding_window": True, "max_window_layers": 0}, 48),
    ],
)
def test_an_agent_never_prompts_with_more_than_the_engine_holds(tmp_path, family, fields, window):
    folder = write_tiny_model(tmp_path, family, **fields)
    engine = load_generation_model(folder, TorchGenerationConfig(device="cpu"))
    assert engine.window_tokens == window
    assert model_context_tokens(folder) == window


def test_a_window_that_an_older_config_only_mentions_does_not_count(tmp_path):
    said = {"max_position_embeddings": 4096, "sliding_window": 64, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert model_context_tokens(tmp_path) == 4096
