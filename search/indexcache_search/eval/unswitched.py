"""Servers that are compared must keep their pattern meanwhile: a search switches that of a calibration server.

`/server_info` says that a server is one, but of earlier versions it says nothing. So an SGLang server that names no
pattern is asked for the status of one, too, which others have not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter

from indexcache_search.engines.answers import STATUS, Status
from indexcache_search.engines.lease import held_by
from indexcache_search.errors import SearchError
from sglang_indexcache.calibration import protocol
from sglang_indexcache.http import servers
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import ServerError, StatusError, ask
from sglang_indexcache.io.redaction import KEY_VARIABLE

SECONDS = 60.0  # for an answer: the server may be reading a long prompt
_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_Switches = list[tuple[int, str, int]]


class Unswitched:
    """Servers whose patterns nobody may switch from now on; those that are not calibration servers never do.

    Args:
        addresses: of the servers, with or without `/v1`.
        notice: hears of a server of which it can't be told whether its pattern stays.

    Raises:
        SearchError: if a search holds the lease of one, or nobody can say.
    """

    def __init__(self, addresses: Sequence[Address], notice: Callable[[str], None] = lambda line: None) -> None:
        self._found: dict[Address, _Switches] = {}
        for address in dict.fromkeys(item.without("/v1") for item in addresses):
            says = _says(address)
            if says:
                self._found[address] = _switches(address)
            elif says is None and (unknown := _unknown(address)):
                notice(f"{address}: {unknown}, so whether its pattern stays can't be told")

    def check(self) -> None:
        """Check that nobody has switched one since.

        Raises:
            SearchError: if somebody has, or a search holds the lease of one now, or one does not answer.
        """
        for address, before in self._found.items():
            if _switches(address) != before:
                raise SearchError(
                    f"{address}: its pattern was switched, or the server restarted, while it was asked; expected a"
                    " server whose pattern stays"
                )


def _says(address: Address) -> bool | None:
    """Return whether a server says that it is a calibration server; `None` of SGLang that names no pattern."""
    try:
        found = servers.ranks(address)
    except ServerError:  # another program's; who needs it to answer says so
        return False
    if any(rank.calibration for rank in found):
        return True
    return False if all(rank.served for rank in found) else None


def _unknown(address: Address) -> str:
    """Say what a server that names no pattern may be; empty if it is none whose pattern is switched."""
    try:
        ask(address, protocol.path(protocol.STATUS), _ANY, {"dp_rank": None}, seconds=SECONDS)
    except StatusError as error:
        if error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            return ""
        return f"answers {error.code} to the question whether it is a calibration server of an older sglang-indexcache"
    except ServerError:
        return "gives no answer to the question whether it is a calibration server of an older sglang-indexcache"
    return "is a calibration server of an older sglang-indexcache, which a search may switch"


def _switches(address: Address) -> _Switches:
    """Return how often the ranks of a calibration server were switched, since which start.

    Raises:
        SearchError: see `Unswitched`.
    """
    try:
        found: Status = ask(address, protocol.path(protocol.STATUS), STATUS, {"dp_rank": None}, seconds=SECONDS)
    except StatusError as error:
        if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise SearchError(
                f"{address}: is a calibration server that refuses the key; expected its admin key in {KEY_VARIABLE},"
                " to see whether a search switches it"
            ) from None
        raise SearchError(f"{error}: {error.detail}") from None
    except ServerError as error:
        raise SearchError(f"{error}; expected a server whose pattern stays") from None
    if found.lease is not None and found.lease.held:
        raise SearchError(f"{address}: {held_by(found.lease)}; expected a server whose pattern stays")
    return sorted((rank.dp_rank, rank.boot, rank.switches) for rank in found.ranks)
