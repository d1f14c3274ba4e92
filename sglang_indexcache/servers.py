"""What running servers say they serve, from `/server_info`."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.pattern import Pattern

KEY_VARIABLE = "SGLANG_API_KEY"
_TIMEOUT = 30


class ServerError(IndexCacheError):
    """A server that does not answer, or not as SGLang does."""


def server_request(url: str, path: str, body: Any = None) -> urllib.request.Request:
    """A request with the key from `SGLANG_API_KEY`; a `body` makes it a POST with JSON.

    Raises:
        ServerError: if `url` is none.
    """
    if not url.startswith(("http://", "https://")):
        raise ServerError(f"{url}: expected a URL like http://host:30000")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})  # noqa: S310
    if os.environ.get(KEY_VARIABLE):
        request.add_header("Authorization", f"Bearer {os.environ[KEY_VARIABLE]}")
    return request


def served_fingerprints(url: str) -> list[str | None]:
    """The fingerprint that each data-parallel rank of the server at `url` reports; `None` for one without a pattern.

    Raises:
        ServerError: if it can't be asked; a key is taken from `SGLANG_API_KEY`.
    """
    request = server_request(url, "/server_info")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
            states = json.load(answer)["internal_states"]
        return [_fingerprint(state) for state in states]
    except urllib.error.HTTPError as error:
        hint = f"; expected the key in {KEY_VARIABLE}" if error.code in (401, 403) else ""
        raise ServerError(f"{url}: /server_info answers {error.code}{hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerError(f"{url}: /server_info can't be read: {reason}") from None
    except (KeyError, TypeError):
        raise ServerError(f"{url}: /server_info has no internal_states, expected an SGLang server") from None


def _fingerprint(state: dict[str, Any]) -> str | None:
    found = state.get("indexcache")
    return None if found is None else str(found["fingerprint"])


def differences(url: str, pattern: Pattern) -> list[str]:
    """One line for each data-parallel rank at `url` that does not serve `pattern`.

    Raises:
        ServerError: if the server can't be asked.
    """
    lines = []
    found = served_fingerprints(url)
    for rank, fingerprint in enumerate(found):
        where = f"{url} DP rank {rank}" if len(found) > 1 else url
        if fingerprint is None:
            lines.append(f"{where} serves without a pattern file, expected fingerprint {pattern.fingerprint[:16]}")
        elif fingerprint != pattern.fingerprint:
            lines.append(
                f"{where} serves fingerprint {fingerprint[:16]}, the pattern file has {pattern.fingerprint[:16]}"
            )
    return lines
