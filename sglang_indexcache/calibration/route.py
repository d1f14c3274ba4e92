"""`POST /indexcache/{action}` of a calibration server; an admin's, by SGLang's own levels."""

from __future__ import annotations

from typing import Any

from sglang_indexcache import probes, protocol
from sglang_indexcache.calibration.control import METHOD
from sglang_indexcache.hooks import bound_arguments


def add_route(*args: Any, **kwargs: Any) -> None:
    """Hook before `_setup_and_run_http_server`."""
    from fastapi import Body
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import DumperControlReqInput
    from sglang.srt.utils.auth import AuthLevel, auth_level

    tokenizer_manager = bound_arguments(probes.HTTP, args, kwargs).arguments["tokenizer_manager"]

    async def control(action: str, body: dict[str, Any] = Body(default={})) -> Any:  # noqa: B008
        # two phases: what one data-parallel rank can't do, none does
        for phase in (protocol.CHECK, action) if action == protocol.SWITCH else (action,):
            request = DumperControlReqInput(method=METHOD, body={**body, "action": phase})
            replies: list[Any] = await tokenizer_manager.dumper_control(request)
            errors = [reply.error for reply in replies if not reply.success]
            if errors:
                return JSONResponse({"error": errors[0]}, status_code=protocol.status_code(errors[0]))
        return JSONResponse({"ranks": [rank for reply in replies for rank in reply.response]})

    app.add_api_route(protocol.path("{action}"), auth_level(AuthLevel.ADMIN_OPTIONAL)(control), methods=["POST"])
