"""A hub on this machine: it answers what the client of Hugging Face asks for files, and counts the requests."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

COMMIT = "1f" * 20
OTHER_COMMIT = "2e" * 20


@dataclass
class FakeHub:
    """What a hub has, and how it answers.

    Attributes:
        files: content by repository, commit and path.
        branches: commits by repository and name.
        headers: headers that replace those of the answer; `None` leaves one out.
        status: status of each answer, unless a file is missing.
        requests: method and path of what was asked.
    """

    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    headers: dict[str, str | None] = field(default_factory=dict)
    status: int = 200
    address: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)

    def put(self, repository: str, path: str, content: bytes, commit: str = COMMIT, branch: str = "main") -> None:
        """Add a file to a commit, and let a branch point to it."""
        self.files[repository, commit, path] = content
        self.branches[repository, branch] = commit

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content for `/org/name/resolve/REVISION/PATH`."""
        words = path.strip("/").split("/")
        if len(words) < 5 or words[2] != "resolve":
            return 404, {}, b""
        repository, revision, name = "/".join(words[:2]), unquote(words[3]), "/".join(words[4:])
        if all(known != repository for known, _ in self.branches):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self.branches.get((repository, revision), revision)
        if all(known != commit for _, known, _ in self.files):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        content = self.files.get((repository, commit, name))
        headers = {"X-Repo-Commit": commit}
        if content is None:
            return 404, {**headers, "X-Error-Code": "EntryNotFound"}, b""
        etag = hashlib.sha1(content).hexdigest()
        changed = {**headers, "ETag": f'"{etag}"', "Content-Length": str(len(content)), **self.headers}
        return self.status, {key: value for key, value in changed.items() if value is not None}, content


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` at its address inside the `with` block."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.respond()

        def do_GET(self) -> None:
            self.respond()

        def respond(self) -> None:
            hub.requests.append((self.command, self.path))
            status, headers, content = hub.answer(self.path.partition("?")[0])
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(address: str, cache: Path, patch: pytest.MonkeyPatch, offline: bool = False) -> None:
    """Let the client in this process ask the hub at `address`."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", offline)
    patch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
