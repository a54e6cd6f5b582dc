"""What a request may be, checked before a dialect sees it."""

import contextlib
import gzip
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.gateway.call import CallError
from areal_ray.gateway.limits import EdgeLimits, check_headers, parsed, unpacked

LIMITS = EdgeLimits(body_bytes=1000, header_bytes=100, num_items=5, depth=8)


def nested(levels: int) -> bytes:
    """An object with lists in it, `levels` deep."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": 1', "is not JSON"),
        (b"", "is not JSON"),
        (b"[1]", "is a list; must be an object"),
        (b'"text"', "is a string; must be an object"),
        (b"null", "is a null; must be an object"),
        (b'{"a": "\xff"}', "is not UTF-8 at byte 7"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": -1e999}', "-1e999 is beyond the numbers"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (nested(9), "nested deeper than 8 levels"),
        (nested(100_000), "nested deeper than 8 levels"),
        (b'{"a": [1, 2, 3, 4, 5, 6]}', "a: 6 items; must be <= 5"),
    ],
)
def test_a_body_that_is_no_json_object_within_the_bounds_is_a_400_that_says_why(body, says):
    with pytest.raises(CallError, match=says) as refused:
        parsed(body, LIMITS)
    assert refused.value.status == 400


def test_what_is_within_the_bounds_is_read():
    assert parsed(nested(8), LIMITS) == json.loads(nested(8))
    assert parsed(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}', LIMITS) == {"a": "\U0001f600"}


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_packed_body_is_unpacked_and_never_beyond_the_bound(pack):
    name = "gzip" if pack is gzip.compress else "deflate"
    assert unpacked(pack(b'{"a": 1}'), name, LIMITS) == b'{"a": 1}'
    with pytest.raises(CallError) as refused:
        unpacked(pack(b"0" * 10_000_000), name, LIMITS)
    assert refused.value.status == 413
    for broken in (b"no such thing", pack(b'{"a": 1}')[:-6]):
        with pytest.raises(CallError) as refused:
            unpacked(broken, name, LIMITS)
        assert refused.value.status == 400


def test_a_body_packed_in_pieces_is_all_of_them_and_what_is_behind_it_is_no_part_of_it():
    pieces = [gzip.compress(piece) for piece in (b'{"a":', b"", b"1}")]
    for name in ("gzip", "x-gzip"):
        assert unpacked(b"".join(pieces) + bytes(9), name, LIMITS) == b'{"a":1}'
    for name, body in (
        ("gzip", pieces[0] + b"more"),
        ("gzip", pieces[1] * 1000),
        ("gzip", b"".join(pieces)[:-3]),
        ("deflate", zlib.compress(b"{}") + b"more"),
    ):
        with pytest.raises(CallError) as refused:
            unpacked(body, name, LIMITS)
        assert refused.value.status == 400
    with pytest.raises(CallError) as refused:
        unpacked(gzip.compress(b"0" * 600) * 2, "gzip", LIMITS)
    assert refused.value.status == 413


def test_a_zstd_body_is_unpacked_within_the_bound():
    zstandard = pytest.importorskip("zstandard")
    assert unpacked(zstandard.compress(b'{"a": 1}'), "zstd", LIMITS) == b'{"a": 1}'
    with pytest.raises(CallError) as refused:
        unpacked(zstandard.compress(b"0" * 10_000_000), "zstd", LIMITS)
    assert refused.value.status == 413
    with pytest.raises(CallError) as refused:
        unpacked(b"no such thing", "zstd", LIMITS)
    assert refused.value.status == 400


def test_encodings_pile_up_and_unknown_ones_are_a_415():
    twice = gzip.compress(gzip.compress(b"{}"))
    assert unpacked(twice, "gzip, GZIP, identity", LIMITS) == b"{}"
    with pytest.raises(CallError, match="'br'") as refused:
        unpacked(b"{}", "br", LIMITS)
    assert refused.value.status == 415


def test_headers_are_bounded_together():
    check_headers([(b"a", b"b" * 95)], LIMITS)
    with pytest.raises(CallError) as refused:
        check_headers([(b"a", b"b" * 40), (b"c", b"d" * 60)], LIMITS)
    assert refused.value.status == 431


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_parse_or_be_refused(body):
    for read in (lambda: parsed(body, LIMITS), lambda: unpacked(body, "gzip", LIMITS)):
        with contextlib.suppress(CallError):
            read()
