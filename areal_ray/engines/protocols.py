"""What a generation engine and a train engine can do; the actors know nothing else of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from areal_ray.core.canary import Probe
from areal_ray.core.config import Config
from areal_ray.core.trajectory import Group, StopReason
from areal_ray.core.turn import TopTokens
from areal_ray.engines.preference import PairEvaluation, PreferencePair
from areal_ray.engines.sft import SftEvaluation, SftExample

if TYPE_CHECKING:
    import torch

OnWeightUpdate = Literal["keep", "recompute", "drain"]


LEAST_TEMPERATURE = 0.01
"""Of sampling that is not greedy; vLLM would quietly raise a lower one to it."""


class SamplingConfig(Config):
    """How one turn is sampled."""

    temperature: float = Field(1.0, ge=0.0)
    """0 = greedy, else at least 0.01: nearer to 0 engines round it, each its own way, and log-probs
    overflow. Behaviour log-probs are at this temperature (at 1 where it is 0)."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Sample among the likeliest tokens that reach this probability. 1 = off."""
    top_k: int = Field(0, ge=0)
    """Sample among so many likeliest tokens. 0 = off."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Sample among tokens at least this times as probable as the likeliest. 0 = off."""
    repetition_penalty: float = Field(1.0, gt=0.0)
    """Divides positive logits of tokens of prompt and turn, multiplies negative ones; 1 = off.
    With it, the penalties below or logit_bias, what samples is not the policy: refused where a
    run trains, and log-probs stay those of the policy without them."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Taken from the logit of each token that the turn holds already, as OpenAI does; 0 = off."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """The same for each time that the turn holds it; 0 = off."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict
    )
    """Token id -> what is added to its logit before penalties and temperature."""
    max_new_tokens: int = Field(256, ge=1)
    """Tokens one turn may sample at most."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Beside the tokenizer's end-of-turn token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a turn, also where they run over several tokens. All sampled tokens, the one
    that completes the text included, stay in the record and train; the reply's text ends before."""

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if 0.0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"is {temperature:g}; must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}"
            )
        return temperature

    @field_validator("logit_bias")
    @classmethod
    def _check_token_ids(cls, logit_bias: dict[str, float]) -> dict[str, float]:
        for key in logit_bias:  # texts, since YAML and JSON allow no others
            if re.fullmatch(r"[0-9]{1,9}", key) is None:
                raise ValueError(f"has the key {key!r}; must be token ids, such as '17'")
        return logit_bias

    @property
    def adjustments(self) -> tuple[str, ...]:
        """Fields in use that make another distribution than the policy's own."""
        plain = {
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
        }
        return tuple(name for name, off in plain.items() if getattr(self, name) != off)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One turn to sample: token ids in."""

    request_id: str
    prompt_ids: NDArray[np.int32]
    """[P] exactly what the model sees."""
    sampling: SamplingConfig
    seed: int = 0
    """With the position it fixes each draw, whatever else is in the batch."""
    prefix_key: str = ""
    """Requests with the same non-empty key begin alike (a group's prompt, an episode's past)."""
    is_streamed: bool = False
    """Whether `on_chunks` gets the turn's tokens as they are sampled, before the whole result."""
    grammar: str = ""
    """What the turn's text is held to, see `core.grammars`; empty = nothing. What samples is then
    not the policy alone; the log-probs stay the policy's own, as with penalties."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are told at each place, whatever is sampled there: by the
    distribution that recorded log-probs are of, before filters, penalties and grammars. Changes no
    token, and costs the requests that do not ask nothing."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What a streamed turn sampled since its last chunk: one token an engine step, or a few."""

    request_id: str
    token_ids: NDArray[np.int32]
    """[N] never empty; a turn's chunks, end to end, are its result's arrays."""
    logprobs: NDArray[np.float32]
    """[N]"""
    versions: NDArray[np.int32]
    """[N]"""
    top: TopTokens | None = None
    """[N] see `GenerationResult.top`."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One sampled turn: token ids out."""

    request_id: str
    token_ids: NDArray[np.int32]
    """[N] the sampled ids; the stop token, or the one that completes a stop string, included."""
    logprobs: NDArray[np.float32]
    """[N] log-prob of each sampled token at the sampling temperature."""
    versions: NDArray[np.int32]
    """[N] version of the weights that sampled each token."""
    stop_reason: StopReason
    error: str = ""
    """Why the engine could not serve this request; then the arrays are empty."""
    is_refused: bool = False
    """Whether that lies in the request, so that no engine of the fleet will serve it."""
    top: TopTokens | None = None
    """[N] the likeliest tokens; None where the request asks for none or the engine has none."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A generation engine's own account of itself."""

    version: int
    num_running: int
    num_waiting: int
    sampled_tokens: int
    """Since start."""
    busy_s: float
    """Seconds spent in prefill and decode since start."""
    idle_for_swap_s: float
    """Seconds paused for weight swaps since start."""
    dtype: str = ""
    """Type the forward pass computes in, as torch names it; empty = unknown."""


OnResults = Callable[[list[GenerationResult]], None]
OnChunks = Callable[[list[GenerationChunk]], None]


class GenerationEngine(Protocol):
    """Samples turns. Owns its own loop (a thread); every method may be called from any thread."""

    def start(self, on_results: OnResults, on_chunks: OnChunks | None = None) -> None:
        """Begin serving; both are called on the engine's own thread, at most once a step.

        Args:
            on_results: Gets the turns that ended in a step.
            on_chunks: Gets what the streamed turns sampled in a step, before `on_results` gets
                those of them that ended. Without it nothing is streamed.
        """

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns. A bad request comes back through `on_results` with its error."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End turns now; they come back with what was sampled and StopReason.ABORT."""

    def pause(self) -> None:
        """Stop between two decode steps; requests stay."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name (as in the Hugging Face checkpoint) and shape of each tensor `swap` expects."""

    def swap(
        self, tensors: Mapping[str, "torch.Tensor"], version: int, policy: OnWeightUpdate
    ) -> float:
        """Load weights between two decode steps; seconds the engine stood still.

        Raises:
            EngineError: Not all was loaded; where some was, the engine samples nothing more.
        """

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T-1] log-probs at temperature 1 of each token [T] but the first, given those before.

        Under the weights in force, also while paused or asleep; sampling goes on meanwhile or
        waits for it.

        Raises:
            EngineError: The ids are none of the model's, none at all or more than its window.
        """

    def sleep(self) -> None:
        """Give the memory of keys and values back; only while paused. Requests stay.

        Weights may be swapped meanwhile. A sleeping engine uses no processor time.

        Raises:
            EngineError: It is not paused.
        """

    def wake(self) -> None:
        """Undo `sleep`: turns under way go on after `resume`, their keys and values made anew."""

    def health(self) -> EngineHealth:
        """What it is doing now."""

    def close(self) -> None:
        """Stop the loop and free memory; unfinished requests come back as aborted."""


@runtime_checkable
class PreparesAhead(Protocol):
    """A generation engine that can do a swap's work while the weights arrive."""

    def prepare_swap(self, tensors: Mapping[str, "torch.Tensor"]) -> None:
        """Do what a `swap` to this very mapping would do before the engine stands still.

        Each tensor is asked for when it is needed, which may wait, or raise. Nothing comes of it
        where another mapping is swapped to.
        """


@runtime_checkable
class ReadsBack(Protocol):
    """A generation engine that can tell whether its live weights are the ones it was given."""

    def differing(self, tensors: Mapping[str, "torch.Tensor"]) -> str:
        """What is live with other bits than `swap` makes of these tensors; empty if nothing is.

        Read beside sampling, after a swap to them and before the next.
        """


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one train step reports: named values, sums over ranks already taken."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Names `area/what_unit`."""
    trained_tokens: int = 0
    num_updates: int = 0
    """Optimizer updates taken; 0 where the whole batch was masked."""


class TrainEngine(Protocol):
    """Owns one rank of the model being trained. Collective: all ranks call alike."""

    def train_step(
        self,
        minibatches: Sequence[Sequence[Group]],
        version: int,
        oldest_version: int | None = None,
    ) -> StepStats:
        """One RL step on this rank's share of the groups, an optimizer update a minibatch.

        `minibatches` follows `algorithms.packing.StepPlan.of_rank`. Tokens of versions older than
        `oldest_version` do not train.
        """

    def sft_step(self, examples: Sequence[SftExample]) -> StepStats:
        """One supervised update on this rank's share of the batch."""

    def evaluate_sft(self, examples: Sequence[SftExample]) -> SftEvaluation:
        """Teacher-forced accuracy over all ranks' shares of held-out examples."""

    def pair_step(self, pairs: Sequence[PreferencePair]) -> StepStats:
        """One update towards telling pairs of answers apart, on this rank's share of the batch."""

    def evaluate_pairs(self, pairs: Sequence[PreferencePair]) -> PairEvaluation:
        """How well all ranks' shares of held-out pairs are told apart."""

    def weights(self) -> Mapping[str, "torch.Tensor"]:
        """The full parameters by Hugging Face name, tied ones once; valid until the next step."""

    def probe(self, num_tokens: int) -> Probe:
        """What an engine that samples from the present weights has to agree with."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint with tokenizer and chat template."""

    def save(self, folder: Path) -> None:
        """`export`, and the optimizer state beside it, into an existing folder."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, optimizer and schedule included."""

    def close(self) -> None:
        """Leave the other ranks."""
