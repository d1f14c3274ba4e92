"""The patterns that running servers report on `/server_info`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from sglang_indexcache.errors import one_line
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import ServerError, ask
from sglang_indexcache.pattern import Pattern


class _Served(BaseModel):
    """The pattern that a scheduler has proven, and whether the proof still holds; of dense models, a selection."""

    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    proven: bool = True
    since: str = "its weights were updated"
    reason: str = "no reason is given"
    selection: dict[str, Any] | None = None


class _ServerState(BaseModel):
    """The state of one data-parallel rank; without the plugin it names no pattern."""

    indexcache: _Served | None = None


class _ServerInfo(BaseModel):
    internal_states: Annotated[list[_ServerState], Field(min_length=1)]


_FORM = TypeAdapter(_ServerInfo)


def differences(server: str | Address, pattern: Pattern) -> list[str]:
    """Return one line for each data-parallel rank at `server` that is not proven to serve `pattern`.

    Raises:
        ServerError: if the server does not answer, or lists no rank; the key is that of `SGLANG_API_KEY`.
    """
    lines, address = [], Address.of(server)
    states = ask(address, "/server_info", _FORM).internal_states
    for rank, state in enumerate(states):
        where, served = f"{address} DP rank {rank}" if len(states) > 1 else str(address), state.indexcache
        if served is None:
            lines.append(f"{where} serves without a pattern file, expected fingerprint {pattern.fingerprint[:16]}")
        elif served.fingerprint != pattern.fingerprint:
            lines.append(
                f"{where} serves fingerprint {served.fingerprint[:16]}, the pattern file has {pattern.fingerprint[:16]}"
            )
        elif not served.proven:
            lines.append(one_line(f"{where} is not proven to serve it since {served.since}: {served.reason}", 400))
    return lines


def fingerprint(server: str | Address) -> str | None:
    """Return the fingerprint of the pattern by which all ranks at `server` read prompts; `None` without a pattern.

    Raises:
        ServerError: if the server does not answer, ranks differ, one is not proven any more, or the model is dense,
            whose prompts are read without the pattern.
    """
    address = Address.of(server)
    states = [state.indexcache for state in ask(address, "/server_info", _FORM).internal_states]
    found = {None if state is None else state.fingerprint for state in states}
    if len(found) > 1:
        raise ServerError(f"{address}: its data-parallel ranks serve different patterns, expected one")
    for state in states:
        if state is not None and not state.proven:
            raise ServerError(
                f"{address}: is not proven to serve its pattern since {state.since}: {one_line(state.reason, 200)}"
            )
        if state is not None and state.selection is not None:
            raise ServerError(f"{address}: serves a dense model, which reads prompts without its pattern")
    return found.pop()
