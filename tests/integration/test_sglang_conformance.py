"""The SGLang adapter is held to what every generation engine must do, over a scripted server."""

from contextlib import ExitStack
from pathlib import Path

from areal_ray.engines.protocols import GenerationEngine
from areal_ray.engines.sglang_generation import SglangGenerationEngine
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from tests.support.conformance import Capacity, EngineConformance, Subject
from tests.support.sglang_server import scripted_server


class _EngineWithServer(SglangGenerationEngine):
    """Ends the server it was made with."""

    def __init__(self, folder: Path, capacity: Capacity, **fields: object) -> None:
        with ExitStack() as stack:
            server = stack.enter_context(scripted_server(folder, version="0"))
            server.is_incremental = True
            config = SglangGenerationConfig.model_validate(
                {
                    "url": server.url,
                    "max_context_tokens": capacity.max_context_tokens,
                    "max_in_flight": capacity.max_running,
                    **fields,
                }
            )
            super().__init__(folder, config)
            self._rest = stack.pop_all()

    def close(self) -> None:
        super().close()
        self._rest.close()


def _made(folder: Path, capacity: Capacity) -> GenerationEngine:
    return _EngineWithServer(folder, capacity)


class TestSglangEngine(EngineConformance):
    subject = Subject(
        "sglang",
        _made,
        lacks={
            "a_grammar_holds_the_text_and_leaves_the_recorded_logprobs_those_of_the_policy": (
                "an SGLang server that takes token ids constrains nothing"
            ),
            "a_grammar_that_cannot_be_kept_refuses_its_turn_and_no_other": "any is refused",
            "half_precision_is_near_and_reported": "the scripted server computes in float32 alone",
        },
        keeps_draws=False,
        idle_share=0.05,  # the scripted server's threads are in this process too
    )
