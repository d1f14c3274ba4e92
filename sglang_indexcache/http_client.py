"""One way to ask a server over HTTP: an answer is bounded in size and time, and has the form that was expected.

Redirects are not followed: the key would go to whoever is named there.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from functools import cache
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from sglang_indexcache.errors import IndexCacheError, one_line

KEY_VARIABLE = "SGLANG_API_KEY"
SECONDS = 30.0
MAX_BYTES = 4 << 20

Answer = TypeVar("Answer")


class ServerError(IndexCacheError):
    """A server that does not answer, or not as it should."""


class NoAnswerError(ServerError):
    """Nothing came, or not all of it, or not in time."""


class StatusError(ServerError):
    """The server answers with an error.

    Attributes:
        code: HTTP status code.
        detail: what it says about it, one line.
    """

    def __init__(self, message: str, code: int, detail: str) -> None:
        super().__init__(message)
        self.code, self.detail = code, detail


def ask(
    url: str,
    path: str,
    form: TypeAdapter[Answer],
    body: Any = None,
    *,
    seconds: float = SECONDS,
    max_bytes: int = MAX_BYTES,
    key: str | None = None,
) -> Answer:
    """What `url` answers on `path`; a `body` makes it a POST with JSON.

    Args:
        url: such as `http://host:30000`.
        path: such as `/server_info`.
        form: what the answer is validated against.
        body: anything that JSON can hold.
        seconds: for everything, from the connection to the last byte.
        max_bytes: size that the answer may have.
        key: sent as a bearer token; by default what `SGLANG_API_KEY` holds.

    Raises:
        NoAnswerError: if nothing comes in time, or more than `max_bytes`, or something that is not HTTP.
        StatusError: if the code is not 200.
        ServerError: if `url` is none, or the answer has another form.
    """
    name = shown(url)
    headers = {"Content-Type": "application/json"}
    key = key or os.environ.get(KEY_VARIABLE)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        code, content = asyncio.run(_exchange(url.rstrip("/") + path, body, headers, seconds, max_bytes))
    except TimeoutError:
        raise NoAnswerError(f"{name}: {path} gave no whole answer within {seconds:g} s") from None
    except _TooLargeError:
        raise NoAnswerError(f"{name}: {path} answers with more than {max_bytes} bytes") from None
    except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
        raise NoAnswerError(f"{name}: {path} can't be read: {one_line(error, 200) or type(error).__name__}") from None
    if code != httpx.codes.OK:
        detail = one_line(content[:1000].decode(errors="replace"), 300)
        raise StatusError(f"{name}: {path} answers {code}{_hint(code)}", code, detail)
    try:
        return form.validate_json(content)
    except ValidationError as error:
        raise ServerError(f"{name}: {path} answers in another form: {_first(error)}") from None


def shown(url: str) -> str:
    """`url` for people: without a password.

    Raises:
        ServerError: if it is none.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError, TypeError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServerError(f"{one_line(url.rpartition('@')[2], 80)}: expected a URL like http://host:30000")
    return str(parsed.copy_with(username=None, password=None)).rstrip("/")


class _TooLargeError(Exception):
    pass


async def _exchange(url: str, body: Any, headers: dict[str, str], seconds: float, max_bytes: int) -> tuple[int, bytes]:
    verify = _certificates() if url.startswith("https") else False  # certificates take 30 ms to load
    async with asyncio.timeout(seconds), httpx.AsyncClient(timeout=None, verify=verify) as client:  # noqa: S113
        request = client.build_request("GET" if body is None else "POST", url, json=body, headers=headers)
        response = await client.send(request, stream=True, follow_redirects=False)
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > max_bytes:
                raise _TooLargeError
        return response.status_code, bytes(content)


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _hint(code: int) -> str:
    if code in (401, 403):
        return f"; expected the key in {KEY_VARIABLE}"
    return "; expected the server itself, redirects are not followed" if 300 <= code < 400 else ""


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return one_line(f"{where}: {first['msg']}" if where else first["msg"], 160)
