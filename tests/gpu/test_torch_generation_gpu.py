"""The embedded engine on a GPU: same promises as on CPU, checked against Transformers there."""

import numpy as np
import pytest
import torch

from tests.support.generation import hf_logprobs, hf_model, random_prompt, request, serving
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize(("dtype", "mean_error"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_logprobs_on_a_gpu_are_those_of_transformers(tmp_path, architecture, dtype, mean_error):
    folder = write_tiny_model(tmp_path / "m", architecture, seed=3)
    sent = [
        request(f"r{i}", random_prompt(i, 5 + 3 * i), seed=i, key="k", max_new_tokens=20)
        for i in range(12)
    ]
    with serving(folder, device="cuda", dtype=dtype, max_slots=5) as served:
        results = served.run(sent)
        served.run([request("again", np.append(sent[0].prompt_ids, 7), key="k")])
    model = hf_model(folder)
    for one, result in zip(sent, results, strict=True):
        assert not result.error
        errors = np.abs(result.logprobs - hf_logprobs(model, one, result)[0])
        assert errors.mean() < mean_error


def test_sleep_gives_memory_of_the_gpu_back_and_turns_go_on(tmp_path):
    folder = write_tiny_model(tmp_path / "m", "qwen3", seed=3, tie_word_embeddings=False)
    sent = [request(f"t{i}", random_prompt(i, 30), seed=i, max_new_tokens=400) for i in range(32)]
    with serving(folder, device="cuda", dtype="float32") as served:
        served.run_until("probe", [*sent, request("probe", [5], max_new_tokens=9)])
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        served.engine.sleep()
        assert torch.cuda.memory_reserved() < before
        ids = random_prompt(9, 40)
        score = served.engine.score(ids)
        served.engine.wake()
        served.engine.resume()
        results = served.wait(*(one.request_id for one in sent))
    model = hf_model(folder)
    for one, result in zip(sent, results, strict=True):
        np.testing.assert_allclose(result.logprobs, hf_logprobs(model, one, result)[0], atol=1e-3)
    first = request("w", ids[:1])
    rest = type(results[0])("w", ids[1:], score, np.zeros(39, np.int32), results[0].stop_reason)
    np.testing.assert_allclose(score, hf_logprobs(model, first, rest)[0], atol=1e-3)
