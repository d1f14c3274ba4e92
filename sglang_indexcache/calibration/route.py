"""The route `POST /indexcache/{action}` of a calibration server; an admin's, by SGLang's own levels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_indexcache.calibration import protocol
from sglang_indexcache.calibration.control import METHOD


@contextmanager
def with_route(tokenizer_manager: Any) -> Iterator[None]:
    """Answer control requests while the block runs: SGLang has one application for all servers of a process.

    Args:
        tokenizer_manager: the server's.
    """
    from fastapi import Body
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import DumperControlReqInput
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def control(action: str, body: dict[str, Any] = Body(default={})) -> Any:  # noqa: B008
        # two phases: what one data-parallel rank can't do, none does
        for phase in (protocol.CHECK, action) if action == protocol.SWITCH else (action,):
            request = DumperControlReqInput(method=METHOD, body={**body, "action": phase})
            replies: list[Any] = await tokenizer_manager.dumper_control(request)
            errors = [reply.error for reply in replies if not reply.success]
            if errors:
                return JSONResponse({"error": errors[0]}, status_code=protocol.status_code(errors[0]))
        return JSONResponse({"ranks": [rank for reply in replies for rank in reply.response]})

    before = list(app.router.routes)
    app.add_api_route(protocol.path("{action}"), auth_level(AuthLevel.ADMIN_OPTIONAL)(control), methods=["POST"])
    try:
        yield
    finally:
        app.router.routes[:] = [route for route in app.router.routes if route in before]
