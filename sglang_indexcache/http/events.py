"""Answers that come piece by piece: server-sent events, as SGLang streams its tokens."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import ServerError, answering
from sglang_indexcache.http.connection import AnswerBudget

_BEGIN, _END = b"data:", b"[DONE]"


def events(
    url: str | Address, path: str, content: bytes, *, seconds: float, max_bytes: int, key: str | None = None
) -> Iterator[bytes]:
    """Send a POST with JSON, and yield the data of each event as soon as it is there; see `ask` for the arguments.

    The request is sent when the first event is asked for.

    Raises:
        ServerError: as `ask`; also if the stream ends without its `[DONE]`.
    """
    address, left = Address.of(url), b""
    with answering(address, path, content, AnswerBudget(seconds, max_bytes, trickles=True), key) as response:
        for received in response.iter_stream():
            *lines, left = (left + received).split(b"\n")
            for line in lines:
                data = line.removeprefix(_BEGIN).strip()
                if data == _END:
                    return
                if line.startswith(_BEGIN):
                    yield data
    raise ServerError(f"{address}: {path} answers in another form: its events end without {_END.decode()}")
