"""A server that streams tokens as SGLang's `/generate` does, and gives logprobs of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_stub import Answering, HttpStub

Events = Iterator[dict[str, Any] | str]


def tokens_of(body: dict[str, Any]) -> Events:
    """Yield an event for each token that a request asks for."""
    count = body["sampling_params"]["max_new_tokens"]
    for number in range(1, count + 1):
        finish = {"type": "length", "length": count} if number == count else None
        meta = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": number, "cached_tokens": 0}
        yield {"output_ids": list(range(number)), "meta_info": {**meta, "finish_reason": finish}}
    yield "[DONE]"


def write_events(handler: BaseHTTPRequestHandler, events: Events) -> None:
    """Answer with server-sent events."""
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.end_headers()
    with suppress(OSError):  # a client that has seen enough
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            handler.wfile.write(f"data: {text}\n\n".encode())


class StreamingStub(HttpStub):
    """A server of threads; `events` makes what a request to `/generate` is answered with, or is a status code."""

    def __init__(self, room: int = 4096) -> None:
        self.events: Callable[[dict[str, Any]], Events] | int = tokens_of
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.room = room
        stub = self

        class Handler(Answering):
            def get(self) -> None:
                found = {"/v1/models": {"data": [{"id": "stub"}]}, "/server_info": {"max_req_input_len": stub.room}}
                self.reply(found[self.path])

            def post(self, body: Any) -> None:
                stub.asked.append((self.path, body, self.headers.get("Authorization")))
                if self.path == "/generate":
                    if isinstance(stub.events, int):
                        self.send_error(stub.events)
                    else:
                        write_events(self, stub.events(body))
                    return
                values = [None, *(-1.0 for _ in body["prompt"])]
                tops = [None, *({"x": 0.0} for _ in body["prompt"])]
                self.reply({"choices": [{"text": "", "logprobs": {"token_logprobs": values, "top_logprobs": tops}}]})

        super().__init__(Handler)

    def prompts(self) -> list[list[int]]:
        """Return the prompts that were timed."""
        return [body["input_ids"] for path, body, _ in self.asked if path == "/generate"]
