"""The lease of a calibration server: one client at a time may switch its patterns, and measure."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.preflight import CalibrationError
from sglang_indexcache.io.errors import one_line

_Line = Annotated[str, Field(pattern=r"^[ -~]{1,200}$")]


class LeaseError(CalibrationError):
    """A request of a client that does not hold the lease."""


class LeaseRequest(BaseModel):
    """Body of a request that takes or renews the lease.

    Attributes:
        token: its secret, new for each client.
        host: name of its machine.
        process: id of its process there.
        seconds: how long the lease outlives the client.
    """

    model_config = {"frozen": True, "strict": True}

    token: Annotated[str, Field(min_length=16, max_length=200)]
    host: _Line
    process: Annotated[int, Field(ge=0)]
    seconds: Annotated[float, Field(gt=0, le=protocol.LEASE_SECONDS)]


class Lease:
    """A lease that ends some seconds after it was last renewed.

    There is one for a server, where its requests come in: ranks each with a clock of their own would not always agree.

    Args:
        clock: seconds that never go back; clients' clocks don't matter.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holder: LeaseRequest | None = None
        self._since, self._ends, self._beats = 0.0, -math.inf, 0
        self._released: deque[object] = deque(maxlen=1000)  # tokens, which a late renewal must not bring back

    def take(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Give the lease to a client, or renew its own; if another holds it, change nothing.

        Returns:
            `granted`, and `state`. A token that was released once gets nothing any more.

        Raises:
            CalibrationError: if the request is none.
        """
        try:
            client = LeaseRequest.model_validate({name: body.get(name) for name in LeaseRequest.model_fields})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise CalibrationError(one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 160)) from None
        if client.token in self._released or (self._live() and not self._is(client.token)):
            return {"granted": False, **self.state()}
        if not self._live():
            self._since = self._clock()
        self._holder = client
        self._renew()
        return {"granted": True, **self.state()}

    def release(self, token: object) -> dict[str, Any]:
        """End the lease of the client with `token` at once; others keep theirs."""
        self._released.append(token)
        if self._is(token):
            self._holder, self._ends = None, -math.inf
        return {"granted": False, **self.state()}

    def check(self, token: object) -> None:
        """Renew the lease of whoever holds it.

        Raises:
            LeaseError: if that is not the client with `token`.
        """
        if self._live() and self._is(token):
            self._renew()
            return
        holder = self._holder
        if holder is None or not self._live():
            raise LeaseError(f"nobody holds the lease; expected {protocol.path(protocol.LEASE)} before")
        raise LeaseError(f"process {holder.process} on {holder.host} holds the lease, expected its token")

    def state(self) -> dict[str, Any]:
        """Return who holds the lease, for how many seconds, when it ends, and how often it was given or renewed.

        All but the last are missing where nobody holds it.
        """
        found: dict[str, Any] = {"beats": self._beats}
        if self._holder is not None and self._live():
            now = self._clock()
            found |= {"host": self._holder.host, "process": self._holder.process}
            found |= {"held_s": round(now - self._since, 3), "ends_in_s": round(self._ends - now, 3)}
        return found

    def _renew(self) -> None:
        assert self._holder is not None
        self._ends = self._clock() + self._holder.seconds
        self._beats += 1

    def _live(self) -> bool:
        return self._clock() < self._ends

    def _is(self, token: object) -> bool:
        return self._holder is not None and self._holder.token == token
