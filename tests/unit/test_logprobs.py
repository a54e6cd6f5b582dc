"""Token log-probs: chunked or not, the same numbers and gradients, in bounded memory."""

import subprocess
import sys

import pytest
import torch

from areal_ray.algorithms.logprobs import logits_logprobs, token_logprobs


def _case(tokens=37, hidden=8, vocabulary=50, bias=False):
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=draw, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, generator=draw, requires_grad=True)
    offset = torch.randn(vocabulary, generator=draw, requires_grad=True) if bias else None
    return states, weight, offset, torch.randint(0, vocabulary, (tokens,), generator=draw)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_are_those_of_the_softmax(bias, temperature):
    states, weight, offset, targets = _case(bias=bias)
    found = token_logprobs(states, weight, offset, targets, temperature=temperature)
    logits = states @ weight.T + (offset if bias else 0.0)
    expected = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(found.logprobs, expected.log_prob(targets), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy, expected.entropy().detach(), atol=1e-5, rtol=0)
    assert found.is_argmax.equal(logits.argmax(-1) == targets)


@pytest.mark.parametrize("rows", [1, 5, 36, 37])
def test_chunks_change_neither_values_nor_gradients(rows):
    states, weight, _, targets = _case()
    whole = token_logprobs(states, weight, None, targets)
    gradients = torch.autograd.grad((whole.logprobs * torch.arange(37)).sum(), (states, weight))
    cut = token_logprobs(states, weight, None, targets, chunk_bytes=rows * 50 * 4)
    torch.testing.assert_close(cut.logprobs, whole.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(cut.entropy, whole.entropy, atol=1e-5, rtol=0)
    assert cut.is_argmax.equal(whole.is_argmax)
    again = torch.autograd.grad((cut.logprobs * torch.arange(37)).sum(), (states, weight))
    for one, other in zip(again, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)


def test_greedy_counts_as_temperature_one():
    states, weight, _, targets = _case()
    greedy = token_logprobs(states, weight, None, targets, temperature=0.0)
    assert greedy.logprobs.equal(token_logprobs(states, weight, None, targets).logprobs)


def test_an_impossible_token_leaves_the_entropy_finite():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    found = logits_logprobs(logits, torch.tensor([1]), 1.0)
    assert found.entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert found.logprobs.item() == pytest.approx(-0.693147, abs=1e-6)


_PEAK = """
import resource
import torch
from areal_ray.algorithms.logprobs import token_logprobs
torch.set_num_threads(1)
hidden = torch.randn(512, 4, requires_grad=True)
weight = torch.randn(150_000, 4, requires_grad=True)
targets = torch.randint(0, 150_000, (512,))
token_logprobs(hidden[:8], weight, None, targets[:8]).logprobs.sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
token_logprobs(hidden, weight, None, targets, chunk_bytes=40 << 20).logprobs.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_large_vocabulary_is_never_held_for_all_tokens_at_once():
    ran = subprocess.run(
        [sys.executable, "-c", _PEAK], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(ran.stdout) < 512 * 150_000 * 4
