"""Toy chat templates and tokenizers with the habits that break token records."""

from typing import Any

import numpy as np

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens

TPL_A = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<c {{ c.function.name }}>{% endfor %}[/]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Appends every message; nothing is ever rewritten."""

TPL_B = (
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and loop.index0 < last.user and '</t>' in m.content %}"
    "{{ m.content.split('</t>')[-1] }}{% else %}{{ m.content }}{% endif %}[/]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Removes thoughts from assistant turns before the last user turn."""

TPL_E = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<c {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}>{% endfor %}"
    "[/]\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes tool-call arguments by iterating over a mapping."""

TPL_J = TPL_E.replace(
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}",
    " {{ c.function.arguments | tojson }}",
)
"""Writes tool-call arguments through a JSON filter."""

TPL_S = "{% if messages[0].role != 'system' %}[system]be brief[/]\n{% endif %}" + TPL_A
"""Inserts a system turn where none is given."""

TPL_X = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TPL_A
)
"""Refuses two messages in a row of one role."""

EOS = "<eos>"
PAD = "<pad>"


def letter_tokenizer(*, eos: str = EOS, specials: tuple[str, ...] = ()) -> Any:
    """One token a character; end of turn and padding are special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(128)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos,
        pad_token=PAD,
        additional_special_tokens=list(specials),
        clean_up_tokenization_spaces=False,
    )


def merging_tokenizer() -> Any:
    """The toy BPE a=0, b=1, c=2, ab=3, bc=4, plus the marks of a template that begins with b."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c")]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=(
            "{% for m in messages %}{{ 'c' if m.role == 'assistant' }}{{ m.content }}bc{% endfor %}"
            "{% if add_generation_prompt %}c{% endif %}"
        ),
        clean_up_tokenization_spaces=False,
    )


class ScriptedTurn:
    """A sampled turn with given ids; log-probs and versions tell the tokens apart."""

    def __init__(
        self,
        token_ids: list[int],
        *,
        version: int = 0,
        stop_reason: StopReason = StopReason.STOP,
    ) -> None:
        count = len(token_ids)
        self.token_ids = np.array(token_ids, np.int32)
        self.logprobs = -0.5 - np.arange(count, dtype=np.float32)
        self.versions = np.full(count, version, np.int32)
        self.stop_reason = stop_reason
        self.top: TopTokens | None = None
