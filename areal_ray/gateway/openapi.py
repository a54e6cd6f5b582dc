"""What OpenAPI says of model calls: the edge answers them before FastAPI, which knows its own
routes alone, looks at them.

The schemas name the fields that mean something here; any others are passed over.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_ray.gateway.call import Dialect

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number"}
TOP_LOGPROBS: Schema = {**WHOLE, "minimum": 0, "maximum": 20}
SECURITY: Sequence[Mapping[str, Sequence[str]]] = ({"bearer": []}, {"x-api-key": []})

_OBJECT: Schema = {"type": "object"}
_PARTS: Schema = {"oneOf": [TEXT, {"type": "array", "items": _OBJECT}]}
_STOP: Schema = {"type": "array", "items": {**TEXT, "minLength": 1}, "maxItems": 16}
_SHARED: Mapping[str, Schema] = {
    "model": TEXT,
    "stream": FLAG,
    "temperature": {**NUMBER, "minimum": 0, "maximum": 2},
    "top_p": {**NUMBER, "minimum": 0, "maximum": 1},
    "top_k": {**WHOLE, "minimum": -1},
    "min_p": {**NUMBER, "minimum": 0, "maximum": 1},
    "presence_penalty": {**NUMBER, "minimum": -2, "maximum": 2},
    "frequency_penalty": {**NUMBER, "minimum": -2, "maximum": 2},
}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": TEXT, "description": TEXT, "parameters": _OBJECT},
    "required": ["name"],
}


def body_of(
    required: Sequence[str], fields: Mapping[str, Schema], *, is_closed: bool = False
) -> dict[str, Any]:
    """A request body in JSON with these fields, and with none beside them where it is closed, as
    OpenAPI has it."""
    schema: dict[str, Any] = {"type": "object", "properties": dict(fields), "required": [*required]}
    schema |= {"additionalProperties": False} if is_closed else {}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def query_of(fields: Mapping[str, Schema]) -> list[dict[str, Any]]:
    """The same for fields of a query."""
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]


def _list_of(needed: Sequence[str], **fields: Schema) -> dict[str, Any]:
    """A list of at least one object."""
    item = {"type": "object", "properties": fields, "required": list(needed)}
    return {"type": "array", "minItems": 1, "items": item}


def _one_of(*texts: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(texts)}


_BODIES: Mapping[str, Mapping[str, Any]] = {
    "chat": body_of(
        ["messages"],
        {
            **_SHARED,
            "messages": _list_of(
                ["role", "content"],
                role=_one_of("system", "developer", "user", "assistant", "tool"),
                content=_PARTS,
                name=TEXT,
                tool_call_id=TEXT,
            ),
            "tools": _list_of(["type"], type=_one_of("function"), function=_FUNCTION),
            **dict.fromkeys(("max_tokens", "max_completion_tokens"), COUNT),
            "n": {**COUNT, "maximum": 16},
            "seed": WHOLE,
            "stop": _STOP,
            "top_logprobs": TOP_LOGPROBS,
            **dict.fromkeys(("logprobs", "parallel_tool_calls"), FLAG),
            "stream_options": {"type": "object", "properties": {"include_usage": FLAG}},
            "user": TEXT,
        },
    ),
    "responses": body_of(
        ["input"],
        {
            **_SHARED,
            "input": {
                "oneOf": [
                    {**TEXT, "minLength": 1},
                    _list_of(
                        ["role", "content"],
                        role=_one_of("system", "developer", "user", "assistant"),
                        content=_PARTS,
                    ),
                ]
            },
            "tools": _list_of(
                ["type", "name"], type=_one_of("function"), name=TEXT, parameters=_OBJECT
            ),
            "max_output_tokens": COUNT,
            "top_logprobs": TOP_LOGPROBS,
            "include": {"type": "array", "items": TEXT},
            **dict.fromkeys(("parallel_tool_calls", "store"), FLAG),
            **dict.fromkeys(("instructions", "previous_response_id"), TEXT),
            **dict.fromkeys(("text", "metadata"), _OBJECT),
        },
    ),
    "messages": body_of(
        ["messages"],
        {
            **_SHARED,
            "messages": _list_of(
                ["role", "content"], role=_one_of("user", "assistant", "system"), content=_PARTS
            ),
            "system": _PARTS,
            "tools": _list_of(["name", "input_schema"], name=TEXT, input_schema=_OBJECT),
            "max_tokens": COUNT,
            "stop_sequences": _STOP,
            **dict.fromkeys(("thinking", "metadata"), _OBJECT),
        },
    ),
    "completions": body_of(
        ["prompt"],
        {
            **_SHARED,
            "prompt": {**TEXT, "minLength": 1},
            "max_tokens": {**WHOLE, "minimum": 0},
            "logprobs": TOP_LOGPROBS,
            "seed": WHOLE,
            "stop": _STOP,
        },
    ),
}


def answers(*, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """The answers of a route, as OpenAPI has them."""
    told: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    streamed: dict[str, Any] = {"text/event-stream": {}} if stream else {}
    return {
        "200": {"description": "The answer", "content": {**told, **streamed}},
        "4XX": {"description": "What is wrong with the request", "content": told},
        "503": {"description": "Try again after Retry-After seconds", "content": told},
    }


def telling_model_calls(
    plain: Callable[[], dict[str, Any]], dialects: Sequence[Dialect]
) -> Callable[[], dict[str, Any]]:
    """FastAPI's description of an application, grown by what the edge answers.

    Args:
        plain: `FastAPI.openapi`.
        dialects: That the edge speaks.
    """

    def whole() -> dict[str, Any]:
        told = plain()
        schemes = told.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["bearer"] = {"type": "http", "scheme": "bearer"}
        schemes["x-api-key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        for dialect in dialects:
            for path in dialect.paths:
                told["paths"][f"/v1{path}"] = _post(dialect, f"{dialect.name} call", stream=True)
            for path in getattr(dialect, "count_paths", ()):
                counts = _post(dialect, f"tokens of a {dialect.name} call", stream=False)
                told["paths"][f"/v1{path}"] = counts
        listed = {"summary": "models", "security": list(SECURITY), "responses": answers()}
        told["paths"]["/v1/models"] = {"get": listed}
        return told

    return whole


def _post(dialect: Dialect, summary: str, *, stream: bool) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "requestBody": _BODIES.get(dialect.name, body_of([], {})),
            "responses": answers(stream=stream),
            "security": list(SECURITY),
        }
    }
