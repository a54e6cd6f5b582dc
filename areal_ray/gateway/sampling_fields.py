"""What a request body asks of how its reply is sampled, read alike by every dialect.

What no engine here can do, or no prompt here is made by, is told by name: `Answers` refuses it
where the client's wishes count. Agents that always send all fields, with values that ask for
nothing, are served. Another provider that answers in place of the policy gets these fields as
they came, and judges them itself; what names the client's users, keeps its data or costs more is
not among them.
"""

from collections.abc import Mapping
from typing import Any

from areal_ray.core.turn import SamplingWishes
from areal_ray.gateway.fields import read_number, refuse, shown

_MOST_BIASED = 1024
_MOST_BIAS = 100.0
_LEAST_REPETITION = 0.01
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "functions": ([],),
}
"""Names that servers of the same API know -> values that ask for nothing, beside null."""
_PASSED_ON = ("reasoning_effort", "verbosity")
"""Names that mean nothing to the engines here, and are passed over."""
_ELSEWHERE: Mapping[tuple[str, str], str] = {
    ("reasoning", "effort"): "reasoning_effort",
    ("text", "verbosity"): "verbosity",
    ("output_config", "effort"): "reasoning_effort",
}
"""Where Responses and Messages have the same."""


def read_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Call`: `temperature`, `top_p`, `wishes`, `unserved` and `passed_on`."""
    wishes = SamplingWishes(
        top_k=_top_k(body),
        min_p=read_number(body, "min_p", 0.0, 1.0),
        repetition_penalty=read_number(body, "repetition_penalty", _LEAST_REPETITION, 100.0),
        presence_penalty=read_number(body, "presence_penalty", -2.0, 2.0),
        frequency_penalty=read_number(body, "frequency_penalty", -2.0, 2.0),
        logit_bias=_logit_bias(body),
    )
    unserved = tuple(
        name
        for name, plain in _UNSERVED.items()
        if body.get(name) is not None and body[name] not in plain
    )
    return {
        "temperature": read_number(body, "temperature", 0.0, 2.0),
        "top_p": read_number(body, "top_p", 0.0, 1.0),
        "wishes": wishes,
        "unserved": unserved,
        "passed_on": _passed_on(body, unserved),
    }


def _passed_on(body: Mapping[str, Any], unserved: tuple[str, ...]) -> dict[str, Any]:
    found = {name: body[name] for name in (*unserved, *_PASSED_ON) if body.get(name) is not None}
    for (outer, inner), name in _ELSEWHERE.items():
        part = body.get(outer)
        if type(part) is dict and part.get(inner) is not None:
            found[name] = part[inner]
    return found


def _top_k(body: Mapping[str, Any]) -> int | None:
    count = body.get("top_k")
    if count is None:
        return None
    if type(count) is int and count in (0, -1):
        return 0
    if type(count) is not int or count < 1:
        refuse("top_k", f"is {shown(count)}; must be a whole number >= 1, or 0 or -1 for all")
    return count


def _logit_bias(body: Mapping[str, Any]) -> tuple[tuple[str, float], ...] | None:
    given = body.get("logit_bias")
    if not given:
        return None
    if type(given) is not dict or len(given) > _MOST_BIASED:
        refuse("logit_bias", f"must be an object of at most {_MOST_BIASED} token ids")
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            refuse("logit_bias", f"has the key {shown(token)}; must be token ids, such as '17'")
        if type(bias) not in (int, float) or not -_MOST_BIAS <= bias <= _MOST_BIAS:
            refuse("logit_bias", f"is {shown(bias)} for {token}; must be from -100 to 100")
    return tuple((token, float(bias)) for token, bias in given.items())
