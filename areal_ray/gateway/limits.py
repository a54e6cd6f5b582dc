"""What a request may be: its size, its depth, its encoding; checked before a dialect sees it.

A request outside of them costs no more than finding that out. `EdgeLimits` are what
`gateway/app.py` holds to; `parsed` makes a JSON object of a body.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal_ray.gateway.call import CallError
from areal_ray.gateway.json_text import is_deeper, read_json

_GZIP_WINDOW = zlib.MAX_WBITS | 16
_MOST_MEMBERS = 64
"""Packed one behind the other to one body; each may be all but empty."""


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Bounds on requests."""

    body_bytes: int = 32 * 2**20
    """Of a body, as sent and unpacked."""
    header_bytes: int = 64 * 2**10
    """Of all headers together."""
    num_items: int = 10_000
    """Of messages, input items or tools."""
    depth: int = 64
    """Levels of lists and objects in each other."""
    body_idle_s: float = 30.0
    """Longest wait for more of a body."""
    body_s: float = 300.0
    """Longest wait for all of it: clients that send a byte now and then hold a place too."""
    keep_alive_s: float = 8.0
    """Longest silence of a stream; clients give up after 15 to 300 s."""
    stalled_reader_s: float = 120.0
    """Longest wait for a client to take what was sent."""
    concurrent_calls: int = 8192
    """More are turned away with 503."""


def check_headers(headers: Sequence[tuple[bytes, bytes]], limits: EdgeLimits) -> None:
    """Refuse headers that are too large.

    Raises:
        CallError: 431.
    """
    size = sum(len(name) + len(text) + 4 for name, text in headers)
    if size > limits.header_bytes:
        raise CallError(
            431,
            "headers_too_large",
            f"headers: {size} bytes; must be <= {limits.header_bytes}. Send fewer or shorter ones",
        )


def body_too_large(limits: EdgeLimits) -> CallError:
    """413, for a body that is over the bound however it is counted."""
    return CallError(
        413,
        "request_too_large",
        f"body: is over {limits.body_bytes} bytes, the most that is read. Send less",
    )


def unpacked(body: bytes, encoding: str, limits: EdgeLimits) -> bytes:
    """The body without its `Content-Encoding`; never more than the bound is unpacked.

    Raises:
        CallError: 400 of a broken one, 413, 415 of an unknown encoding.
    """
    for name in reversed([name.strip() for name in encoding.lower().split(",")]):
        if name in ("", "identity"):
            continue
        try:
            body = _UNPACK[name](body, limits.body_bytes + 1)
        except (KeyError, ImportError):  # zstd needs a package of its own
            raise CallError(
                415,
                "unsupported_encoding",
                f"content-encoding: {name[:40]!r} is not read here. Send gzip, deflate or identity",
            ) from None
        except (zlib.error, ValueError) as error:
            raise CallError(400, "invalid_encoding", f"body: is no {name}: {error}") from error
        if len(body) > limits.body_bytes:
            raise body_too_large(limits)
    return body


def parsed(body: bytes, limits: EdgeLimits) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        CallError: 400: no UTF-8, no JSON, no object, too deep, too many items, or text that is no
            Unicode.
    """
    try:
        text = body.decode("utf-8-sig")
        found = read_json(text)
    except UnicodeDecodeError as error:
        raise _invalid(f"is not UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise _invalid("has half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise _invalid(f"is nested deeper than {limits.depth} levels") from error
    except ValueError as error:
        raise _invalid(f"is not JSON: {error}") from error
    if type(found) is not dict:
        raise _invalid(f"is a {_JSON_NAMES.get(type(found), 'value')}; must be an object")
    if is_deeper(found, limits.depth):
        raise _invalid(f"is nested deeper than {limits.depth} levels")
    for name, items in found.items():
        if type(items) is list and len(items) > limits.num_items:
            raise CallError(
                400,
                "too_many_items",
                f"{name}: {len(items)} items; must be <= {limits.num_items}",
                param=name,
            )
    return found


def _invalid(message: str) -> CallError:
    return CallError(400, "invalid_json", f"body: {message}")


def _inflate(window: int) -> Callable[[bytes, int], bytes]:
    def inflate(body: bytes, most: int) -> bytes:
        whole, rest = b"", body
        for _ in range(_MOST_MEMBERS):
            stream = zlib.decompressobj(window)
            whole += stream.decompress(rest, most - len(whole))
            if len(whole) >= most:
                return whole
            if not stream.eof:
                raise ValueError("it ends too early")
            rest = stream.unused_data.lstrip(b"\0")  # some pad it
            if not rest:
                return whole
        raise ValueError(f"it was packed in more than {_MOST_MEMBERS} pieces")

    return inflate


def _unpack_zstd(body: bytes, most: int) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            return bytes(reader.read(most))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


_UNPACK: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _inflate(_GZIP_WINDOW),
    "x-gzip": _inflate(_GZIP_WINDOW),
    "deflate": _inflate(zlib.MAX_WBITS),
    "zstd": _unpack_zstd,
}
_JSON_NAMES = {list: "list", str: "string", type(None): "null", bool: "boolean"}
