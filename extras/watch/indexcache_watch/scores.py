"""The loss of a request's own tokens on an SGLang server, by `/generate`."""

from __future__ import annotations

import math
from http import HTTPStatus

import numpy as np
from pydantic import TypeAdapter

from indexcache_search.engines.answers import Generated, token_logprobs
from indexcache_search.errors import NonFiniteLossError, SearchError
from indexcache_watch.outage import described, temporary
from indexcache_watch.requests import Request
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import StatusError, ask
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS

REQUEST_SECONDS = 600.0
PIECE = EXACT_ROWS - 1  # tokens that its last queries predict, each selecting for itself
_BYTES, _BYTES_A_TOKEN = 1 << 20, 1 << 10  # limits of an answer
_GENERATED: TypeAdapter[Generated] = TypeAdapter(Generated)


class RefusedError(Exception):
    """A server's refusal of one request, such as one that is too long for it; its text is one line."""


def loss(server: Address, request: Request, in_blocks: bool = False) -> float:
    """Return the summed loss of the tokens that count, in nats.

    The server reads prompt and reply at once and generates nothing. It computes logprobs from the first token that
    counts on, so a prompt may come from its prefix cache. One that selects for blocks of prompt queries reads a reply
    in pieces, whose queries select for themselves as they do while it is written.

    Args:
        server: its address.
        request: prompt, reply and which tokens count.
        in_blocks: whether it selects for blocks of prompt queries.

    Raises:
        RefusedError: if the server refuses this request.
        NonFiniteLossError: if the loss is NaN or infinite.
        IndexCacheError: if it does not answer, which may be `temporary`, or not with logprobs of these tokens.
    """
    start, end = int(request.counts.argmax()), len(request.tokens)
    step = PIECE if in_blocks else end
    pieces = [(first, min(first + step, end)) for first in range(start, end, step)]
    total = sum(_loss(server, request, *piece) for piece in pieces if request.counts[slice(*piece)].any())
    if not math.isfinite(total):
        raise NonFiniteLossError(f"{server}: the loss of {request.place} is {total}")
    return total


def _loss(server: Address, request: Request, start: int, end: int) -> float:
    """Return the summed loss of the tokens that count from `start` up to `end`; nothing behind is read."""
    body = {
        "input_ids": request.tokens[:end].tolist(),
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,  # the first one comes without a logprob
        "top_logprobs_num": 1,
        "log_metrics": False,  # in the server's own metrics clients alone count
    }
    limit = _BYTES + end * _BYTES_A_TOKEN
    try:
        answer = ask(server, "/generate", _GENERATED, body, seconds=REQUEST_SECONDS, max_bytes=limit)
    except StatusError as error:
        if error.code in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
            raise RefusedError(error.detail) from None
        raise error if temporary(error) else SearchError(described(error)) from None
    try:
        found = token_logprobs(answer, request.tokens[start:end].tolist())
    except ValueError as error:
        raise SearchError(f"{server}: /generate answers {error}") from None
    return -float(np.asarray([value for value, _ in found])[request.counts[start:end]].sum())
