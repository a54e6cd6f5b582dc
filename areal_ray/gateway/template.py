"""Chat messages <-> token ids, by the tokenizer and the chat template of a checkpoint.

Templates write their own special tokens, so nothing is ever added beside them.
"""

import functools
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.context_window import LARGEST_TOKENS, allowed_tokens
from areal_ray.errors import DataError
from areal_ray.gateway.messages import RAW, conversation
from areal_ray.gateway.token_bytes import TokenBytes

_KEPT_TEXTS = 512
_KEPT_CHARACTERS = 8192
_KEPT_TOKENS = 64
"""Siblings see and say the same short texts; longer ones are not kept."""
_PROBE = "Q0Q"
_UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What a template comes to grief by over a tool's schema that is not as it takes schemas to be."""
_TOLD_OF_FUNCTIONS = ("name", "description", "parameters")
_KEYED = {"role", "content", "name", "tool_call_id"}
"""What of a message a kept rendering is found by."""


class JsonMapping(dict[str, Any]):
    """Tool arguments for a template: iterates as a mapping, prints as the JSON it came from."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)


class ChatTemplate:
    """Renders conversations and encodes text; stateless but for caches.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template: Jinja source to use in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        source = chat_template or getattr(tokenizer, "chat_template", None)
        if not source:
            raise DataError(
                f"{getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}: has no chat "
                "template. Use an instruction-tuned checkpoint or add one to its tokenizer"
            )
        self.tokenizer = tokenizer
        self._source = source
        self.pad_id: int | None = tokenizer.pad_token_id
        self.end_ids: frozenset[int] = frozenset(
            i for i in (tokenizer.eos_token_id, *_turn_enders(tokenizer)) if i is not None
        )
        """Ids that end a turn: the tokenizer's eos and ChatML's."""
        added = tokenizer.added_tokens_decoder
        self._specials = tuple(token.content for token in added.values())
        self._added = {token.content: number for number, token in added.items()}
        self._hidden = {number: token.content for number, token in added.items() if token.special}
        self._encode_kept = functools.lru_cache(maxsize=_KEPT_TEXTS)(self._encode)
        self._short_ids = re.search(r"length\s*!=\s*9\b", str(source)) is not None
        """Mistral's templates refuse ids of calls that have not nine characters."""
        self._compiled = _compile(tokenizer, source)
        self._backend = _plain_backend(tokenizer)
        self._names = dict(tokenizer.special_tokens_map)
        self._decode_kept = functools.lru_cache(maxsize=_KEPT_TEXTS)(self._decode)
        self._rendered: OrderedDict[Any, str] = OrderedDict()
        self.token_bytes = TokenBytes(tokenizer)
        """Bytes that one id stands for, special tokens included."""

    @classmethod
    def from_folder(cls, folder: Path | str) -> "ChatTemplate":
        """Load the tokenizer of a checkpoint folder (or hub name).

        Raises:
            DataError: No usable tokenizer there, or it has no chat template.
        """
        try:
            tokenizer = _load_tokenizer(str(folder))
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise DataError(f"{folder}: no tokenizer could be loaded: {first_line}") from error
        return cls(tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. `messages` are canonical (`gateway.messages`); a raw prompt
        alone is its own text.

        Raises:
            ValueError: The template refuses the conversation.
        """
        if len(messages) == 1 and messages[0]["role"] == RAW:
            return str(messages[0]["content"])
        key = None if tools else _short_key(messages, add_generation_prompt)
        kept = None if key is None else self._rendered.get(key)
        if kept is not None:
            return kept
        text = self._render(messages, tools, add_generation_prompt)
        if key is not None:
            self._rendered[key] = text
            if len(self._rendered) > _KEPT_TEXTS:
                self._rendered.popitem(last=False)
        return text

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        from jinja2 import TemplateError

        shown = [_for_template(message, self._short_ids) for message in messages]
        asked = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            if shown and not tools and self._compiled is not None:
                return str(self._compiled.render({**self._names, **asked, "messages": shown}))
            text = self.tokenizer.apply_chat_template(
                shown,
                tools=[_shown_tool(tool) for tool in tools] if tools else None,
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, *_UNREADABLE) as error:
            raise ValueError(
                f"the chat template refused {len(messages)} messages "
                f"({', '.join(message['role'] for message in messages)}): {error}"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens in it recognised, none added."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> NDArray[np.int32]:
        """[N] the same, read-only: siblings share it."""
        return self._encode_kept(text) if len(text) <= _KEPT_CHARACTERS else self._encode(text)

    def _encode(self, text: str) -> NDArray[np.int32]:
        if self._backend is not None and len(text) > _KEPT_CHARACTERS:
            # A batch of one: this lets other threads go on meanwhile, `encode` does not.
            (read,) = self._backend.encode_batch([text], add_special_tokens=False)
            listed = read.ids
        elif self._backend is not None:
            listed = self._backend.encode(text, add_special_tokens=False).ids
        else:
            listed = self.tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(listed, np.int32)
        ids.flags.writeable = False
        return ids

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of the conversation up to where the assistant speaks; a plain list."""
        return self.encode(self.render(messages, tools))

    def count_prompt_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Length of `prompt_ids`, the messages as a task source gives them."""
        return len(self.prompt_ids(conversation(messages)))

    @property
    def source(self) -> str:
        """The template itself, in Jinja."""
        return str(self._source)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those of the given texts that are special tokens, which `decode` leaves out."""
        wanted = set(texts)
        return frozenset(number for number, text in self._hidden.items() if text in wanted)

    def added_id(self, text: str) -> int | None:
        """Id of a text that was added to the vocabulary as one token; None of others."""
        return self._added.get(text)

    @property
    def why_no_grammars(self) -> str:
        """Why no grammar can be made for this tokenizer; empty if one can."""
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            return "the model has no tokenizer.json. Save its tokenizer as a fast one."
        return ""

    def tokenizer_json(self) -> str:
        """The tokenizer as text of a tokenizer.json."""
        return str(self.tokenizer.backend_tokenizer.to_str())

    def decode(self, ids: Sequence[int], shown: frozenset[int] = frozenset()) -> str:
        """Text of `ids` without special tokens but for those of `shown`."""
        if not shown.isdisjoint(ids):
            seen = [i for i in ids if i in shown or i not in self._hidden]
            return self._decode(seen, False)
        short = len(ids) <= _KEPT_TOKENS
        return self._decode_kept(tuple(ids), True) if short else self._decode(ids, True)

    def token_text(self, token_id: int) -> str:
        """The text that one id stands for, special tokens included."""
        return self._decode_kept((token_id,), False)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(
            self.tokenizer.decode(
                list(ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def starts_with_special(self, text: str) -> bool:
        """Whether `text` opens with an added token, across which no merge can happen."""
        return text.startswith(self._specials)

    @functools.cached_property
    def turn_close(self) -> str:
        """What the template writes after an assistant turn, e.g. `<|im_end|>` and a newline."""
        asked = {"role": "user", "content": _PROBE}
        said = {"role": "assistant", "content": _PROBE}
        text = self.render([asked, said], add_generation_prompt=False)
        return text.rpartition(_PROBE)[2]


def prompt_counter(folder: Path | str) -> Callable[[Sequence[Mapping[str, Any]]], int]:
    """Counts the tokens of prompts; loads the tokenizer for the first one alone."""
    load = functools.cache(lambda: ChatTemplate.from_folder(folder))
    return lambda messages: load().count_prompt_tokens(messages)


def model_context_tokens(folder: Path | str) -> int:
    """Tokens of prompt and reply that a checkpoint was made for, at most 8192."""
    allowed = said_context_tokens(Path(folder)) or _known_context_tokens(str(folder))
    return min(allowed or LARGEST_TOKENS, LARGEST_TOKENS)


def said_context_tokens(folder: Path) -> int:
    """What the folder's config.json allows by itself; 0 if it does not say."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sliding = said.get("sliding_window") if said.get("use_sliding_window", True) else None
        return allowed_tokens(
            int(said["max_position_embeddings"]),
            None if sliding is None else int(sliding),
            said.get("layer_types"),
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return 0


def _known_context_tokens(folder: str) -> int:
    """As Transformers says, whose import takes seconds; 0 if it does not."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise DataError(
            f"{folder}: no model configuration could be loaded: {first_line}"
        ) from error
    names = ("max_position_embeddings", "sliding_window", "layer_types")
    return allowed_tokens(*(getattr(config, name, None) for name in names))


def _short_key(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> Any:
    """What a rendering depends on, if that is little text and nothing else; else None."""
    told: list[Any] = [add_generation_prompt]
    length = 0
    for message in messages:
        if not message.keys() <= _KEYED:
            return None
        length += len(message["content"])
        told += (message["role"], message["content"])
        if len(message) > 2:
            told.append((message.get("name"), message.get("tool_call_id")))
    return tuple(told) if length <= _KEPT_CHARACTERS else None


def _compile(tokenizer: Any, source: Any) -> Any:
    """The template as Transformers compiles it; None where only the tokenizer itself can render.

    What names it may use lie in one plain mapping: Jinja would else search a chain of them, and
    Transformers prepare its own arguments, for each rendering.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    renders = getattr(type(tokenizer), "apply_chat_template", None)
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    is_usual = renders is PreTrainedTokenizerBase.apply_chat_template
    has_one = isinstance(source, str) and not isinstance(tokenizer.chat_template, dict)
    if compile_template is None or not is_usual or not has_one:
        return None
    compiled = compile_template(source).environment.from_string(source)
    compiled.globals = dict(compiled.globals)
    return compiled


def _plain_backend(tokenizer: Any) -> Any:
    """What encodes for a tokenizer that adds nothing to it; None for one of another kind.

    Transformers spend several times as long on what a text of a few tokens does not need.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.encode is PreTrainedTokenizerBase.encode
        and not tokenizer.split_special_tokens
    )
    if not is_plain:
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


def _load_tokenizer(folder: str) -> Any:
    """The tokenizer of a checkpoint folder or hub name."""
    if (Path(folder) / "tokenizer.json").is_file():
        # AutoTokenizer would import torch: some seconds of each agent actor's start, for nothing.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _turn_enders(tokenizer: Any) -> list[int | None]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary.get(token) for token in ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>")]


def _shown_tool(tool: Mapping[str, Any]) -> Any:
    """The same tool gives the same prompt, whoever serialised it: of a function, what tells the
    model of it, without what APIs are asked for beside (`strict`)."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        kept = {name: text for name, text in function.items() if name in _TOLD_OF_FUNCTIONS}
        tool = {"type": "function", "function": kept}
    return _sorted(tool)


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value) if value[key] is not None}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value


def _for_template(message: Mapping[str, Any], short_ids: bool) -> dict[str, Any]:
    shown = dict(message)
    if "reasoning" in shown:
        shown["reasoning_content"] = shown.pop("reasoning")  # as templates name it
    if "tool_calls" in shown:
        shown["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": JsonMapping(call["function"]["arguments"]),
                },
            }
            for call in shown["tool_calls"]
        ]
    if short_ids:
        for named in (shown, *shown.get("tool_calls", ())):
            for key in named.keys() & {"id", "tool_call_id"}:
                named[key] = _nine_letters(named[key])
    return shown


def _nine_letters(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.blake2s(call_id.encode(), digest_size=5).hexdigest()[:9]
