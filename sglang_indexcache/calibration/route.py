"""Answers of a calibration server over HTTP: to one client at a time, in phases that all ranks take part in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.lease import Lease, LeaseError
from sglang_indexcache.calibration.preflight import CalibrationError


class Reply(Protocol):
    """The reply of one data-parallel rank (`DumperControlReqOutput` of SGLang)."""

    success: bool
    response: list[Any]
    error: str


class Route:
    """Answers of one server.

    Args:
        ask: sends a request to all ranks, and returns the replies of data-parallel ranks.
        lease: of this server.
    """

    def __init__(self, ask: Callable[[dict[str, Any]], Awaitable[Sequence[Reply]]], lease: Lease | None = None) -> None:
        self._ask, self._lease = ask, lease or Lease()

    async def answer(self, action: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status code and the JSON that answer `body`, posted to the route of `action`."""
        try:
            return 200, await self._answer(action, body)
        except LeaseError as error:
            return protocol.LOCKED, {"error": str(error)}
        except CalibrationError as error:
            return protocol.status_code(str(error)), {"error": str(error)}

    async def _answer(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        token = body.get("token")
        if action == protocol.STATUS:
            return {**await self._ranks(action, body), "lease": self._lease.state()}
        version = body.get("protocol", 1)
        if version != protocol.VERSION:
            raise CalibrationError(protocol.differing(protocol.VERSION, version))
        if action == protocol.LEASE:
            return self._lease.take(body)
        if action == protocol.RELEASE:
            return self._lease.release(token)
        # two phases: what one data-parallel rank can't do, none does
        for phase in (protocol.CHECK, action) if action == protocol.SWITCH else (action,):
            self._lease.check(token)
            answer = await self._ranks(phase, body)
        return answer

    async def _ranks(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        content = {name: value for name, value in body.items() if name != "token"}
        replies = await self._ask({**content, "action": action})
        errors = [reply.error for reply in replies if not reply.success]
        if errors:
            raise CalibrationError(errors[0])
        return {"ranks": [rank for reply in replies for rank in reply.response]}
