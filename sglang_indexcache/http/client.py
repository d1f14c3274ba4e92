"""Requests to a server over HTTP: the answer is bounded in size and time, and has the expected form.

Redirects are not followed: the key would go to the server that they name. A request also works inside a running event
loop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import httpcore
from pydantic import TypeAdapter, ValidationError

from sglang_indexcache.http.address import Address
from sglang_indexcache.http.connection import AnswerBudget, BudgetError, NoProxyError, connections
from sglang_indexcache.http.proxy import Proxy
from sglang_indexcache.io.errors import IndexCacheError, one_line
from sglang_indexcache.io.redaction import KEY_VARIABLE, keep_secret

SECONDS = 30.0
MAX_BYTES = 4 << 20
_DETAIL_BYTES = 64 << 10  # largest text of an error, of which one line is shown

Answer = TypeVar("Answer")


class ServerError(IndexCacheError):
    """A server that does not answer as it should."""


class NoAnswerError(ServerError):
    """An answer that did not come, not completely, or not in time."""


class StatusError(ServerError):
    """An answer with an error code.

    Attributes:
        code: HTTP status code.
        detail: the server's explanation, one line.
    """

    def __init__(self, message: str, code: int, detail: str) -> None:
        super().__init__(message)
        self.code, self.detail = code, detail

    @property
    def whole(self) -> str:
        """The message with the explanation, if there is one."""
        return f"{self}: {self.detail}" if self.detail else str(self)


def ask(
    url: str | Address,
    path: str,
    form: TypeAdapter[Answer],
    body: Any = None,
    *,
    seconds: float = SECONDS,
    max_bytes: int = MAX_BYTES,
    key: str | None = None,
) -> Answer:
    """Return the answer of `url` on `path`; a `body` makes the request a POST with JSON.

    Args:
        url: such as `http://host:30000`; a user in it is sent instead of a key.
        path: such as `/server_info`.
        form: type that the answer is validated against, strictly: no text for a number.
        body: anything that JSON can hold.
        seconds: for everything, from the connection to the last byte.
        max_bytes: largest size of the answer.
        key: sent as a bearer token; by default the content of `SGLANG_API_KEY`.

    Raises:
        AddressError: if `url` is invalid.
        ProxyError: if the environment names a proxy that can't be used.
        NoAnswerError: if nothing comes in time, or more than `max_bytes`, or something that is not HTTP, or a proxy
            answers in the server's place.
        StatusError: if the code is not 200.
        ServerError: if the key can't be sent, or the answer has another form.
    """
    address, budget = Address.of(url), AnswerBudget(seconds, max_bytes)
    place, content = _place(address, path, Proxy.of(address)), None if body is None else encoded(body)
    with answering(address, path, content, budget, key) as response:
        kind, answer = _content_type(response.headers), response.read()
    if kind not in ("", "application/json") and not kind.endswith("+json"):
        raise ServerError(f"{place} answers in another form: found {one_line(kind, 60)}, expected JSON")
    try:
        json.loads(answer.decode(), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
        return form.validate_json(answer, strict=True)
    except ValidationError as error:
        raise ServerError(f"{place} answers in another form: {_first(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{place} answers in another form: Invalid JSON: {one_line(error, 100)}") from None


def encoded(body: Any) -> bytes:
    """Return the JSON of a request."""
    return json.dumps(body, allow_nan=False).encode()


@contextmanager
def answering(
    address: Address, path: str, content: bytes | None, budget: AnswerBudget, key: str | None = None
) -> Iterator[httpcore.Response]:
    """Send a request, a POST if it has `content`; yield the answer with code 200, whose bytes have yet to be read.

    Raises:
        ServerError: as `ask`, also while bytes are read inside the `with` block.
    """
    proxy, method = Proxy.of(address), "GET" if content is None else "POST"
    place = _place(address, path, proxy)
    headers = [("Accept", "*/*"), ("Content-Type", "application/json"), *_authorization(address, key)]
    try:
        with (
            connections(address, budget) as pool,
            pool.stream(method, address.target(path), headers=headers, content=content) as response,
        ):
            if response.status != HTTPStatus.OK:
                detail = one_line(response.read()[:_DETAIL_BYTES].decode(errors="replace"), 300)
                refusal = None if proxy is None else proxy.refusal(response.status, response.headers)
                if refusal is not None:
                    raise NoAnswerError(f"{address}: {path}: {refusal}")
                raise StatusError(
                    f"{place} answers {response.status}{_hint(response.status, address)}", response.status, detail
                )
            yield response
    except BudgetError as error:
        raise NoAnswerError(f"{place} {error}") from None
    except httpcore.TimeoutException:
        raise NoAnswerError(f"{place} {budget.late()}") from None
    except httpcore.ProxyError as error:
        how = "can't be reached" if isinstance(error, NoProxyError) else "does not connect to it"
        expected = "expected another" if proxy is None else proxy.way_out
        raise NoAnswerError(f"{address}: {path}: {proxy} {how}: {one_line(error, 200)}; {expected}") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        raise NoAnswerError(f"{place} can't be read: {one_line(error, 200) or type(error).__name__}") from None


def _place(address: Address, path: str, proxy: Proxy | None) -> str:
    """Say what was asked, and through which proxy."""
    return f"{address}: {path}" if proxy is None else f"{address}: {path} through {proxy}"


def _authorization(address: Address, key: str | None) -> list[tuple[str, str]]:
    """Return the header that identifies the caller."""
    if address.authorization is not None:
        return [("Authorization", address.authorization)]
    key = key or os.environ.get(KEY_VARIABLE)
    if not key:
        return []
    keep_secret(key)
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ServerError(f"{address}: the key holds what no header may, expected ASCII letters in {KEY_VARIABLE}")
    return [("Authorization", f"Bearer {key}")]


def _content_type(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the media type, such as `text/html`; empty if the server names none."""
    said = next((value for name, value in headers if name.lower() == b"content-type"), b"")
    return said.partition(b";")[0].strip().lower().decode("ascii", errors="replace")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a key that stands there twice: nobody knows which of its values counts."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands there twice")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _hint(code: int, address: Address) -> str:
    if code in (401, 403):
        return f"; expected the key in {KEY_VARIABLE}" if address.authorization is None else "; it refuses the user"
    return "; expected the server itself, redirects are not followed" if 300 <= code < 400 else ""


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return one_line(f"{where}: {first['msg']}" if where else first["msg"], 160)
