"""SGLang servers whose speed is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from indexcache_search.engines.answers import Answer
from indexcache_search.engines.timed_request import send
from indexcache_search.errors import SearchError
from indexcache_search.eval.speed.turns import Load, Timed, measured
from indexcache_search.results.schema import SpeedRow
from indexcache_search.results.variant import Variant
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import StatusError, ask
from sglang_indexcache.io.fields import Count

BASIS = "streamed by the servers, prompts of random tokens"


class _Info(Answer):
    """A part of `/server_info`: the limit of prompts, from the context and from the memory of the cache."""

    max_req_input_len: Count


_INFO: TypeAdapter[_Info] = TypeAdapter(_Info)


def own(address: Address) -> Address:
    """Return the address of SGLang's own routes, beside those of OpenAI's protocol."""
    return address.without("/v1")


def check(addresses: Sequence[Address], loads: Sequence[Load]) -> None:
    """Check that each server takes the longest prompt, with what is generated behind it.

    Raises:
        SearchError: naming the server, its limit and what was requested.
        ServerError: if one does not answer.
    """
    longest = max(loads, key=lambda load: load.context + load.output_tokens)
    for address in map(own, addresses):
        space = room(address, "--speed")
        if longest.context + longest.output_tokens > space:
            raise SearchError(
                f"--speed: {address} has room for {space} tokens, expected {longest.context} of a prompt and"
                f" {longest.output_tokens} generated"
            )


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


def measure(
    addresses: Sequence[Address],
    lines: Sequence[Variant],
    loads: Sequence[Load],
    pool: NDArray[np.int32],
    done: Callable[[], None],
) -> Iterator[list[SpeedRow]]:
    """Yield the rows of one load after the other, each as it is done.

    Args:
        addresses: the servers, the baseline first.
        lines: their lines in the comparison.
        loads: what they are given to do.
        pool: tokens that prompts are made of, `[n]`.
        done: called after each load.

    Raises:
        IndexCacheError: if a server does not answer, or not as requested.
    """
    items = [Timed(line, partial(send, own(address))) for line, address in zip(lines, addresses, strict=True)]
    for load in loads:
        yield measured(items, load, pool, BASIS)
        done()
