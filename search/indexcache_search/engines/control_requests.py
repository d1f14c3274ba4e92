"""Requests to a calibration server, whose failures say what a client can do about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter

from indexcache_search.errors import SearchError
from sglang_indexcache.calibration import protocol
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import NoAnswerError, ServerError, StatusError, ask
from sglang_indexcache.io.redaction import KEY_VARIABLE

_Answer = TypeVar("_Answer")


class ServerLostError(Exception):
    """Failure of a server that went away or broke, and may come back."""


class ServerBusyError(ServerLostError):
    """Refusal by a server that still runs other requests."""


class LeaseEndedError(ServerLostError):
    """Refusal by a server whose lease this client does not hold any more; it may take it again."""


@dataclass(frozen=True)
class Control:
    """The way to a server.

    Attributes:
        address: the server.
        key: the admin key; by default the value of `SGLANG_API_KEY`.
    """

    address: Address
    key: str | None = field(default=None, repr=False)

    def ask(
        self, path: str, body: dict[str, Any], form: TypeAdapter[_Answer], seconds: float, max_bytes: int
    ) -> _Answer:
        """Post `body`, and return the answer; see `http.client.ask`.

        Raises:
            ServerLostError: if the same request may be answered later.
            SearchError: if it never will.
        """
        url = self.address.label
        try:
            return ask(self.address, path, form, body, seconds=seconds, max_bytes=max_bytes, key=self.key)
        except NoAnswerError as error:
            raise ServerLostError(str(error)) from None
        except StatusError as error:
            control = path.startswith(protocol.path(""))
            if error.code == protocol.CONFLICT and control:
                raise ServerBusyError(f"{url}: {error.detail}") from None
            if error.code == protocol.LOCKED and control:
                raise LeaseEndedError(f"{url}: its lease ended: {error.detail}") from None
            if error.code in (401, 403):
                raise SearchError(f"{url}: refuses the key; expected the admin key in {KEY_VARIABLE}") from None
            if error.code == 404 and control:
                raise SearchError(f"{url}: is not in calibration mode; expected --indexcache-calibrate") from None
            if error.code >= 500:
                raise ServerLostError(f"{url}: answers {error.code}") from None
            raise SearchError(error.whole) from None
        except ServerError as error:
            raise SearchError(f"{error}; expected a server with this version of sglang-indexcache") from None
