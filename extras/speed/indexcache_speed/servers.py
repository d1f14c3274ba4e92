"""SGLang servers whose speed is measured."""

from __future__ import annotations

from collections.abc import Sequence

from indexcache_search.errors import SearchError
from indexcache_search.eval.endpoints import room
from indexcache_speed.turns import Load
from sglang_indexcache.http.address import Address

BASIS = "streamed by the servers, prompts of random tokens"


def check(addresses: Sequence[Address], loads: Sequence[Load]) -> None:
    """Check that each server takes the longest prompt, with what is generated behind it.

    Raises:
        SearchError: naming the server, its limit and what was requested.
        ServerError: if one does not answer.
    """
    longest = max(loads, key=lambda load: load.context + load.output_tokens)
    for address in (item.without("/v1") for item in addresses):
        space = room(address, "--speed")
        if longest.context + longest.output_tokens > space:
            raise SearchError(
                f"--speed: {address} has room for {space} tokens, expected {longest.context} of a prompt"
                f" and {longest.output_tokens} generated"
            )
