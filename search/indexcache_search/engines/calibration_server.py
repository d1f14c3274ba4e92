"""A SGLang server in calibration mode, over HTTP."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, NoReturn

from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.calibration.divergence import Range
from sglang_indexcache.servers import KEY_VARIABLE, server_request

REQUEST_SECONDS = 3600  # one sequence of hundreds of thousands of tokens on a busy machine
BUSY_SECONDS = 120
_CONFLICT = 409


class ServerLostError(Exception):
    """A server that went away or broke; it may come back."""


class ServerBusyError(Exception):
    """A server that has other requests running."""


class CalibrationServer:
    """Switches patterns and asks for losses.

    Args:
        url: such as `http://host:30000`; an admin key is taken from `SGLANG_API_KEY`.
        dp_rank: the data-parallel rank to work with; by default the server as a whole.
    """

    def __init__(self, url: str, dp_rank: int | None = None) -> None:
        self.url, self.dp_rank = url.rstrip("/"), dp_rank

    def status(self) -> dict[str, Any]:
        """What runs there: pattern, fingerprint, versions, what can be measured, digest of the model's config.json.

        Raises:
            ServerLostError: if it does not answer.
            SearchError: if it is no calibration server, or refuses the key.
        """
        return self._control("status")[0]

    def lanes(self) -> list[CalibrationServer]:
        """The server's data-parallel ranks, each of which can run a pattern of its own.

        Raises:
            ServerLostError, SearchError: as `status`.
        """
        ranks = sorted(rank["dp_rank"] for rank in self._control("status"))
        return [self] if len(ranks) == 1 else [CalibrationServer(self.url, rank) for rank in ranks]

    def switch(self, pattern: Pattern) -> None:
        """Make all ranks run `pattern`; waits while requests are running.

        Raises:
            ServerLostError: if it does not answer, or stays busy.
            SearchError: if it refuses the pattern, or a rank runs another one afterwards.
        """
        deadline, pause = time.monotonic() + BUSY_SECONDS, 0.02
        while True:
            try:
                ranks = self._control("switch", pattern=pattern.roles)
                break
            except ServerBusyError as error:
                if time.monotonic() > deadline:
                    raise ServerLostError(str(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        for rank in ranks:
            if rank["fingerprint"] != pattern.fingerprint:
                raise SearchError(f"{self.url}: rank {rank['dp_rank']} runs {rank['pattern']}, expected {pattern}")

    def logprobs(
        self, sequences: Sequence[Sequence[int]], start: int, ids: Sequence[str] | None = None
    ) -> list[list[tuple[float, bool]]]:
        """Logprob of each token from `start` on, and whether it is the likeliest.

        Args:
            sequences: of token ids.
            start: at least 1.
            ids: of the requests, where something is measured on them.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it refuses the sequences.
        """
        body: dict[str, Any] = {
            "input_ids": [list(tokens) for tokens in sequences],
            "sampling_params": {"temperature": 0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first one comes without a logprob
            "top_logprobs_num": 1,
        }
        if ids is not None:
            body["rid"] = list(ids)
        if self.dp_rank is not None:
            body["routed_dp_rank"] = self.dp_rank
        answers = self._post("/generate", body)
        try:
            if len(answers) != len(sequences):
                raise ValueError
            return [_pairs(answer["meta_info"]) for answer in answers]
        except (KeyError, IndexError, TypeError, ValueError):
            raise SearchError(f"{self.url}: /generate answers without input logprobs for each sequence") from None

    def missing_baselines(self, data: str, ranges: Sequence[Range]) -> list[int]:
        """Announce a data set whose divergence will be measured.

        Args:
            data: its digest.
            ranges: of each sequence, the positions whose next token is scored, the last one excluded.

        Returns:
            Numbers of the sequences whose baseline is still to be run.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it has too little memory for them, or can't measure this.
        """
        ranks = self._control("baseline", data=data, ranges=ranges)
        return sorted({number for rank in ranks for number in rank["missing"]})

    def divergences(self, requests: Mapping[str, Sequence[Range]]) -> dict[str, tuple[float, float, int]]:
        """Sum, sum of squares and count of the divergence over ranges of positions, for requests by id.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it was not measured there.
        """
        sums = self._control("kl", requests=requests)[0]["sums"]
        return {rid: (_number(total), _number(squares), count) for rid, (total, squares, count) in sums.items()}

    def sample_indices(self, positions: Sequence[int]) -> None:
        """Begin to sample the queries at `positions` of requests that ask for it.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if it can't.
        """
        self._control("sample", positions=[int(position) for position in positions])

    def index_overlap(self) -> tuple[list[list[float]], int]:
        """End sampling; the mean overlap of layers i and j, and how many queries were sampled.

        Raises:
            ServerLostError: if the server goes away.
            SearchError: if nothing was sampled there.
        """
        answer = self._control("overlap")[0]
        return answer["overlap"], answer["queries"]

    def _control(self, action: str, **body: Any) -> list[dict[str, Any]]:
        """The answers of all ranks that `action` was meant for."""
        answer = self._post(f"/indexcache/{action}", {**body, "dp_rank": self.dp_rank})
        try:
            ranks = [rank for rank in answer["ranks"] if self.dp_rank in (None, rank["dp_rank"])]
        except (KeyError, TypeError):
            raise SearchError(
                f"{self.url}: answers as another version of sglang-indexcache; expected this one"
            ) from None
        if not ranks:
            raise SearchError(f"{self.url}: has no data-parallel rank {self.dp_rank}")
        return ranks

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = server_request(self.url, path, body)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            self._refuse(error, path)
        except (OSError, HTTPException, ValueError) as error:
            raise ServerLostError(f"{self.url}: {getattr(error, 'reason', None) or error}") from None

    def _refuse(self, error: urllib.error.HTTPError, path: str) -> NoReturn:
        text = error.read().decode(errors="replace")
        try:
            content = json.loads(text)
        except ValueError:
            content = {}
        reason = f"{self.url}: {' '.join(str(content.get('error') or content.get('message') or text).split())[:300]}"
        if error.code == _CONFLICT:
            raise ServerBusyError(reason) from None
        if error.code in (401, 403):
            raise SearchError(f"{self.url}: refuses the key; expected the admin key in {KEY_VARIABLE}") from None
        if error.code == 404 and path.startswith("/indexcache/"):
            raise SearchError(f"{self.url}: is not in calibration mode; expected --indexcache-calibrate") from None
        if error.code >= 500:
            raise ServerLostError(f"{self.url}: answers {error.code}") from None
        raise SearchError(reason) from None


def _number(value: float | None) -> float:
    """JSON has null where a number is not finite."""
    return math.nan if value is None else value


def _pairs(meta: Mapping[str, Any]) -> list[tuple[float, bool]]:
    """Logprob, NaN for null, and whether it is the likeliest, of each token but the first."""
    pairs = zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
    return [(_number(own[0]), own[1] == best[0][1]) for own, best in pairs]
