"""What running servers say they serve, from `/server_info`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from sglang_indexcache.address import Address
from sglang_indexcache.http_client import ask
from sglang_indexcache.pattern import Pattern


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)  # SGLang adds to what it says with every version


class _Served(_Answer):
    """What a scheduler has proven."""

    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _State(_Answer):
    """Of one data-parallel rank; without the plugin it says nothing of a pattern."""

    indexcache: _Served | None = None


class _ServerInfo(_Answer):
    internal_states: Annotated[list[_State], Field(min_length=1)]


_FORM = TypeAdapter(_ServerInfo)


def served_fingerprints(url: str | Address) -> list[str | None]:
    """The fingerprint that each data-parallel rank of the server at `url` has proven; `None` for one without a pattern.

    Raises:
        ServerError: if it can't be asked, or no rank answers; a key is taken from `SGLANG_API_KEY`.
    """
    states = ask(url, "/server_info", _FORM).internal_states
    return [None if state.indexcache is None else state.indexcache.fingerprint for state in states]


def differences(server: str | Address, pattern: Pattern) -> list[str]:
    """One line for each data-parallel rank at `server` that does not serve `pattern`.

    Raises:
        ServerError: if the server can't be asked.
    """
    lines, address = [], Address.of(server)
    fingerprints = served_fingerprints(address)
    for rank, fingerprint in enumerate(fingerprints):
        where = f"{address} DP rank {rank}" if len(fingerprints) > 1 else str(address)
        if fingerprint is None:
            lines.append(f"{where} serves without a pattern file, expected fingerprint {pattern.fingerprint[:16]}")
        elif fingerprint != pattern.fingerprint:
            lines.append(
                f"{where} serves fingerprint {fingerprint[:16]}, the pattern file has {pattern.fingerprint[:16]}"
            )
    return lines
