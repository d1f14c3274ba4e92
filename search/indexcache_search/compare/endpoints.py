"""Servers that speak OpenAI's completions protocol: SGLang, vLLM and others."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import cached_property
from http.client import HTTPException
from typing import Any

from indexcache_search.errors import SearchError
from sglang_indexcache.servers import KEY_VARIABLE, server_request

REQUEST_SECONDS = 3600


class Endpoint:
    """A server.

    Args:
        url: such as `http://host:30000`, without `/v1`; a key is taken from `SGLANG_API_KEY`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    @cached_property
    def model(self) -> str:
        """The first model that the server has.

        Raises:
            SearchError: if it does not say.
        """
        try:
            return str(self._send("/v1/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise SearchError(f"{self.url}: /v1/models names no model, expected an OpenAI-compatible server") from None

    def logprobs(self, tokens: Sequence[int]) -> list[tuple[float, bool]]:
        """Logprob of each token but the first, and whether it was the likeliest.

        Raises:
            SearchError: if the server does not give logprobs of a prompt.
        """
        answer = self._complete(tokens, 1, {"echo": True, "logprobs": 1})
        try:
            found = answer["logprobs"]
            values = found["token_logprobs"][1 : len(tokens)]
            best = [max(item.values()) for item in found["top_logprobs"][1 : len(tokens)]]
            pairs = [(float(value), value >= top) for value, top in zip(values, best, strict=True)]
        except (KeyError, TypeError, ValueError, AttributeError):
            pairs = []
        if len(pairs) != len(tokens) - 1:
            raise SearchError(
                f"{self.url}: gives no logprobs of a prompt, expected a server that does for echo with logprobs"
            )
        return pairs

    def generate(self, tokens: Sequence[int], count: int) -> str:
        """What the model says after `tokens`, greedily, in up to `count` tokens.

        Raises:
            SearchError: if the server does not answer.
        """
        return str(self._complete(tokens, count, {}).get("text", ""))

    def _complete(self, tokens: Sequence[int], count: int, more: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": count, "temperature": 0, **more}
        try:
            choice: dict[str, Any] = self._send("/v1/completions", body)["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise SearchError(f"{self.url}: /v1/completions answers without choices") from None
        return choice

    def _send(self, path: str, body: Any) -> Any:
        try:
            with urllib.request.urlopen(server_request(self.url, path, body), timeout=REQUEST_SECONDS) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            hint = f"; expected the key in {KEY_VARIABLE}" if error.code in (401, 403) else ""
            detail = " ".join(error.read(400).decode(errors="replace").split())
            raise SearchError(f"{self.url}: {path} answers {error.code}{hint}: {detail[:200]}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise SearchError(f"{self.url}: {path} can't be read: {getattr(error, 'reason', None) or error}") from None
