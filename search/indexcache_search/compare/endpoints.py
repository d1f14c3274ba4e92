"""Servers that speak OpenAI's completions protocol: SGLang, vLLM and others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, BaseModel, Field, TypeAdapter

from indexcache_search.errors import SearchError
from sglang_indexcache.http_client import StatusError, ask, shown

REQUEST_SECONDS = 3600.0
ROUNDING = 1e-3  # nats by which a logprob may be above 0
_BYTES, _BYTES_A_TOKEN = 4 << 20, 1 << 10  # of an answer

_Logprob = Annotated[float, AllowInfNan(False), Field(le=ROUNDING)]
_Answer = TypeVar("_Answer")


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Logprobs(BaseModel):
    token_logprobs: list[_Logprob | None]
    top_logprobs: list[dict[str, _Logprob] | None]


class _Choice(BaseModel):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


_MODELS: TypeAdapter[_Models] = TypeAdapter(_Models)
_COMPLETION: TypeAdapter[_Completion] = TypeAdapter(_Completion)


class Endpoint:
    """A server.

    Args:
        url: such as `http://host:30000`, without `/v1`; a key is taken from `SGLANG_API_KEY`.
    """

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/").removesuffix("/v1")
        self.url = shown(self.address)

    @cached_property
    def model(self) -> str:
        """The first model that the server has.

        Raises:
            SearchError: if it does not say.
        """
        return self._ask("/v1/models", _MODELS, None, 0).data[0].id

    def logprobs(self, tokens: Sequence[int]) -> list[tuple[float, bool]]:
        """Logprob of each token but the first, and whether it was the likeliest.

        Raises:
            SearchError: if the server does not give logprobs of a prompt.
        """
        logprobs = self._complete(tokens, 1, {"echo": True, "logprobs": 1}).logprobs
        own = [] if logprobs is None else logprobs.token_logprobs[1 : len(tokens)]
        best = [] if logprobs is None else logprobs.top_logprobs[1 : len(tokens)]
        pairs = [
            (value, value >= max(top.values()))
            for value, top in zip(own, best, strict=False)
            if top and value is not None
        ]
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
        return self._complete(tokens, count, {}).text

    def _complete(self, tokens: Sequence[int], count: int, more: dict[str, Any]) -> _Choice:
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": count, "temperature": 0, **more}
        return self._ask("/v1/completions", _COMPLETION, body, len(tokens) + count).choices[0]

    def _ask(self, path: str, form: TypeAdapter[_Answer], body: Any, tokens: int) -> _Answer:
        limit = _BYTES + tokens * _BYTES_A_TOKEN
        try:
            return ask(self.address, path, form, body, seconds=REQUEST_SECONDS, max_bytes=limit)
        except StatusError as error:
            raise SearchError(f"{error}: {error.detail}") from None
