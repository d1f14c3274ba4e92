"""Patterns of running servers, by their `/server_info`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter

from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import ask
from sglang_indexcache.io.errors import PatternError, one_line
from sglang_indexcache.io.fields import Count
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern.indexer_setting import IndexerSetting


class Counted(BaseModel):
    """The first passes in which indexers were counted, by kind, and the kinds that are still to come."""

    passes: dict[str, Count] = {}
    longest_prompt: Count | None = None
    to_come: list[str] = []


class Served(BaseModel):
    """The pattern that a scheduler has proven, and what else it says of it; `None` is not said."""

    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    pattern: str | None = None
    source: str | None = None
    version: str | None = None
    proven: bool = True
    since: str | None = None
    reason: str | None = None
    selection: dict[str, Any] | None = None
    proven_ranks: Count | None = None
    full_layers: Count | None = None
    shared_layers: Count | None = None
    sharded_layers: Count = 0
    sharded_ranks: Count = 0
    grouped_layers: Count = 0
    counted: Counted | None = None
    saved_kv_bytes_per_token: Count | None = None
    saved_weight_bytes: Count | None = None
    prompt_score_bytes: Count | None = None
    indexer_runs: Count | None = None
    indexer_skips: Count | None = None
    decode_passes: Count | None = None

    @property
    def in_blocks(self) -> bool:
        """Return whether layers select for blocks of prompt queries.

        Raises:
            PatternError: if the pattern has what this version does not know.
        """
        return any([IndexerSetting.parse(word) for word in (self.pattern or "").split("+")[1:]])

    @property
    def since_when(self) -> str:
        """Return since when a server is not proven, and why."""
        since = self.since or "its weights were updated"
        return f"since {since}: {one_line(self.reason or 'no reason is given', 200)}"


class _ServerState(BaseModel):
    """The state of one data-parallel rank; without the plugin it names no pattern."""

    indexcache: Served | None = None
    indexcache_calibration: bool = False


class _ServerInfo(BaseModel):
    internal_states: Annotated[list[_ServerState], Field(min_length=1)]
    version: str | None = None
    model: str | None = Field(None, alias="model_path")


class ServedRank(BaseModel):
    """Statement of one data-parallel rank of a server.

    Attributes:
        server: its URL, without secrets.
        dp_rank: number of the rank; `None` where there is only one.
        sglang: version of SGLang, if the server says it.
        model: its path or name, if the server says it.
        served: the pattern; `None` where none is served.
        calibration: whether searches may switch its pattern.
    """

    server: str
    dp_rank: int | None
    sglang: str | None
    model: Annotated[str | None, Field(exclude=True)] = None
    served: Served | None
    calibration: Annotated[bool, Field(exclude=True)] = False

    @property
    def name(self) -> str:
        """Return the URL, with the rank where there are several."""
        return self.server if self.dp_rank is None else f"{self.server} DP rank {self.dp_rank}"

    def problem(self, pattern: Pattern) -> str | None:
        """Return a line if this rank is not proven to serve `pattern`."""
        served, expected = self.served, pattern.fingerprint[:16]
        if self.calibration:
            return f"{self.name} is a calibration server, expected fingerprint {expected}"
        if served is None:
            return f"{self.name} serves without a pattern file, expected fingerprint {expected}"
        if served.fingerprint != pattern.fingerprint:
            return f"{self.name} serves fingerprint {served.fingerprint[:16]}, the pattern file has {expected}"
        if not served.proven:
            return one_line(f"{self.name} is not proven to serve it {served.since_when}", 400)
        return None


_FORM = TypeAdapter(_ServerInfo)


def reads_in_blocks(server: str | Address) -> bool:
    """Return whether a server says that it selects for blocks of prompt queries.

    Of a prompt it then gives logprobs that see later tokens, but for those of its last `EXACT_ROWS` queries.

    Raises:
        ServerError: as `ranks`.
        PatternError: if its pattern has what this version does not know.
    """
    found = ranks(server)
    try:
        return any([rank.served.in_blocks for rank in found if rank.served is not None])
    except PatternError as error:
        raise PatternError(f"{found[0].server}: {error}") from None


def ranks(server: str | Address) -> list[ServedRank]:
    """Ask a server what each of its data-parallel ranks serves.

    Raises:
        ServerError: if the server does not answer, or lists no rank; the key is that of `SGLANG_API_KEY`.
    """
    address = Address.of(server)
    info = ask(address, "/server_info", _FORM)
    several = len(info.internal_states) > 1
    return [
        ServedRank(
            server=address.label,
            dp_rank=number if several else None,
            sglang=info.version,
            model=info.model,
            served=state.indexcache,
            calibration=state.indexcache_calibration,
        )
        for number, state in enumerate(info.internal_states)
    ]
