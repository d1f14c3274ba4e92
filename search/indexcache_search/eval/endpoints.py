"""Servers that speak OpenAI's completions protocol: SGLang, vLLM and others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import AllowInfNan, Field, TypeAdapter

from indexcache_search.engines.answers import Answer
from indexcache_search.errors import SearchError
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import StatusError, ask
from sglang_indexcache.io.fields import Count

REQUEST_SECONDS = 3600.0
ROUNDING = 1e-3  # nats by which a logprob may exceed the largest
_BYTES, _BYTES_A_TOKEN = 4 << 20, 1 << 10  # bytes of a response, and of each of its tokens

_Logprob = Annotated[float, AllowInfNan(False), Field(le=ROUNDING)]
_Answer = TypeVar("_Answer")


class _Model(Answer):
    id: Annotated[str, Field(min_length=1, max_length=1000)]


class _Models(Answer):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Logprobs(Answer):
    token_logprobs: list[_Logprob | None]
    top_logprobs: list[dict[str, _Logprob] | None]
    tokens: list[str] | None = None


class _CompletionChoice(Answer):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Usage(Answer):
    prompt_tokens: Count | None = None


class _Completion(Answer):
    choices: Annotated[list[_CompletionChoice], Field(min_length=1, max_length=1)]
    usage: _Usage | None = None


class _Info(Answer):
    """A part of `/server_info`: the limit of prompts, from the context and from the memory of the cache."""

    max_req_input_len: Count


_INFO: TypeAdapter[_Info] = TypeAdapter(_Info)
_MODELS: TypeAdapter[_Models] = TypeAdapter(_Models)
_COMPLETION: TypeAdapter[_Completion] = TypeAdapter(_Completion)


class Endpoint:
    """A server that speaks OpenAI's completions protocol.

    Args:
        address: such as `http://host:30000`, with or without `/v1`. The key is read from `SGLANG_API_KEY`.

    Attributes:
        url: the address without secrets, for messages.
    """

    def __init__(self, address: str | Address) -> None:
        self.address = Address.of(address).without("/v1")
        self.url = self.address.label

    @cached_property
    def model(self) -> str:
        """Name of the server's first model.

        Raises:
            SearchError: if the server does not name one.
        """
        return self._ask("/v1/models", _MODELS, None, 0).data[0].id

    def logprobs(self, tokens: Sequence[int]) -> list[tuple[float, bool]]:
        """Return the logprob of each token but the first, and whether it was the likeliest.

        Raises:
            SearchError: if the server does not give logprobs of a prompt.
        """
        found = self._complete(tokens, 1, {"echo": True, "logprobs": 1}).logprobs
        lengths = set() if found is None else {len(found.token_logprobs), len(found.top_logprobs)}
        if found is not None and found.tokens is not None:
            lengths.add(len(found.tokens))
        pairs: list[tuple[float, bool]] = []
        if found is not None and len(lengths) == 1 and lengths <= {len(tokens), len(tokens) + 1}:  # one was generated
            for value, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
                if value is None or not top or len(pairs) == len(tokens) - 1:
                    break
                if value > max(top.values()) + ROUNDING:
                    raise SearchError(f"{self.url}: gives a token that is likelier than the likeliest")
                pairs.append((value, value >= max(top.values())))
        if len(pairs) != len(tokens) - 1:
            raise SearchError(
                f"{self.url}: gives no logprobs of a prompt, expected a server that does for echo with logprobs"
            )
        return pairs

    def generate(self, tokens: Sequence[int], count: int) -> str:
        """Generate up to `count` tokens after `tokens` greedily, and return their text.

        Raises:
            SearchError: if the server does not answer.
        """
        return self._complete(tokens, count, {}).text

    def _complete(self, tokens: Sequence[int], count: int, more: dict[str, Any]) -> _CompletionChoice:
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": count, "temperature": 0, **more}
        answer = self._ask("/v1/completions", _COMPLETION, body, len(tokens) + count)
        read = None if answer.usage is None else answer.usage.prompt_tokens
        if read not in (None, len(tokens)):
            raise SearchError(f"{self.url}: read {read} tokens, expected the {len(tokens)} that were sent")
        return answer.choices[0]

    def _ask(self, path: str, form: TypeAdapter[_Answer], body: Any, tokens: int) -> _Answer:
        limit = _BYTES + tokens * _BYTES_A_TOKEN
        try:
            return ask(self.address, path, form, body, seconds=REQUEST_SECONDS, max_bytes=limit)
        except StatusError as error:
            raise SearchError(error.whole) from None


def room(address: Address, option: str) -> int:
    """Return the tokens of the longest prompt that a server takes, with its reply.

    Raises:
        SearchError: naming `option`, if it is no SGLang server.
        ServerError: if it does not answer.
    """
    try:
        return ask(address, "/server_info", _INFO).max_req_input_len
    except StatusError as error:
        if error.code != 404:
            raise
        raise SearchError(f"{option}: {address} has no /server_info, expected an SGLang server") from None
