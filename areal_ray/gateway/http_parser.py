"""HTTP/1.1 that goes on where a client offers another protocol, as it lets servers do.

Java's HTTP client and curl offer HTTP/2 with what they send. The parser that uvicorn uses takes
what follows such a request's headers, its body too, for the other protocol: nobody would read it.
"""

from typing import Any, Protocol

import httptools

_OFFERED = (b"upgrade", b"http2-settings")


class Begun(Protocol):
    """What uvicorn's protocol knows of the request that it is told of."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class PlainParser:
    """Stands in for httptools' parser. An offer is left out, and its request told anew.

    What it calls in the protocol has to pass over a request while `should_upgrade` is true.

    Args:
        protocol: Is called back.
    """

    def __init__(self, protocol: Begun) -> None:
        self._protocol = protocol
        self._parser = self._fresh()

    def feed_data(self, piece: bytes) -> None:
        """Take more of a connection.

        Raises:
            httptools.HttpParserError: It is no HTTP.
        """
        while True:
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("is no proxy") from None
                (rest_at,) = offer.args
                piece = self._head() + piece[rest_at:]
                self._parser = self._fresh()
            else:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def _fresh(self) -> Any:
        parser = httptools.HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser

    def _head(self) -> bytes:
        """Of the request, without the offer."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self._protocol.url, version)]
        for name, text in self._protocol.headers:
            if name == b"connection":
                options = [option.strip() for option in text.split(b",")]
                text = b", ".join(one for one in options if one.lower() not in _OFFERED)
            if name not in _OFFERED:
                lines.append(name + b": " + text)
        return b"\r\n".join((*lines, b"", b""))
