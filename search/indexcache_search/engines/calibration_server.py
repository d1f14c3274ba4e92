"""A SGLang server in calibration mode, over HTTP."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.servers import KEY_VARIABLE

REQUEST_SECONDS = 3600  # one sequence of hundreds of thousands of tokens on a busy machine
BUSY_SECONDS = 120
_CONFLICT = 409


class ServerLostError(Exception):
    """A server that went away or broke; it may come back."""


class CalibrationServer:
    """Switches patterns and asks for losses.

    Args:
        url: such as `http://host:30000`; an admin key is taken from `SGLANG_API_KEY`.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise SearchError(f"--endpoint is {url}, expected a URL like http://host:30000")
        self.url = url.rstrip("/")

    def status(self) -> dict[str, Any]:
        """What the server runs: pattern, fingerprint, versions, digest of its model's config.json.

        Raises:
            ServerLostError: if it does not answer.
            SearchError: if it is no calibration server, or refuses the key.
        """
        found: dict[str, Any] = self._post("/indexcache/status", {})
        return found

    def switch(self, pattern: Pattern) -> None:
        """Make all ranks run `pattern`; waits while requests are running.

        Raises:
            ServerLostError: if it does not answer, or stays busy.
            SearchError: if it refuses the pattern.
        """
        deadline, pause = time.monotonic() + BUSY_SECONDS, 0.02
        while True:
            answer = self._post("/indexcache/switch", {"pattern": pattern.roles}, allow_busy=True)
            if answer.get("fingerprint") == pattern.fingerprint:
                return
            if "error" not in answer:
                raise SearchError(f"{self.url}: runs {answer.get('pattern')} after a switch to {pattern}")
            if time.monotonic() > deadline:
                raise ServerLostError(f"{self.url} is {answer['error']}")
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def logprobs(self, sequences: Sequence[Sequence[int]], start: int) -> list[list[tuple[float, bool]]]:
        """Logprob of each token from `start` on, and whether it is the likeliest.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it refuses the sequences.
        """
        body = {
            "input_ids": [list(tokens) for tokens in sequences],
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first one comes without a logprob
            "top_logprobs_num": 1,
        }
        answers = self._post("/generate", body)
        try:
            if len(answers) != len(sequences):
                raise ValueError
            return [_pairs(answer["meta_info"]) for answer in answers]
        except (KeyError, IndexError, TypeError, ValueError):
            raise SearchError(f"{self.url}: /generate answers without input logprobs for each sequence") from None

    def _post(self, path: str, body: dict[str, Any], allow_busy: bool = False) -> Any:
        request = urllib.request.Request(  # noqa: S310  (the scheme was checked)
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        if os.environ.get(KEY_VARIABLE):
            request.add_header("Authorization", f"Bearer {os.environ[KEY_VARIABLE]}")
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return self._refused(error, path, allow_busy)
        except (OSError, HTTPException, ValueError) as error:
            raise ServerLostError(f"{self.url}: {getattr(error, 'reason', None) or error}") from None

    def _refused(self, error: urllib.error.HTTPError, path: str, allow_busy: bool) -> Any:
        text = error.read().decode(errors="replace")
        try:
            content = json.loads(text)
        except ValueError:
            content = {}
        if allow_busy and error.code == _CONFLICT:
            return content
        if error.code in (401, 403):
            raise SearchError(f"{self.url}: refuses the key; expected the admin key in {KEY_VARIABLE}") from None
        if error.code == 404 and path.startswith("/indexcache/"):
            raise SearchError(f"{self.url}: is not in calibration mode; expected --indexcache-calibrate") from None
        if error.code >= 500:
            raise ServerLostError(f"{self.url}: answers {error.code}") from None
        reason = content.get("error") or content.get("message") or text
        raise SearchError(f"{self.url}: {' '.join(str(reason).split())[:200]}") from None


def _pairs(meta: Mapping[str, Any]) -> list[tuple[float, bool]]:
    """Logprob, NaN for null, and whether it is the likeliest, of each token but the first."""
    pairs = zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
    return [(float("nan") if own[0] is None else own[0], own[1] == best[0][1]) for own, best in pairs]
