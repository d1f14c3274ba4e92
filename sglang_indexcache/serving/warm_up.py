"""A warm-up prompt that is longer than a selection, before SGLang's own, which has a few tokens and selects nothing.

A server is ready once SGLang's warm-up was answered. With this prompt in front of it, indexers were counted by then in
a pass in which they select. Read: `_wait_and_warmup` in sglang/srt/entrypoints/http_server.py of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_indexcache.serving import engines
from sglang_indexcache.sglang.hooks import Hooks, bound_to
from sglang_indexcache.sglang.meaning import data_parallel_ranks
from sglang_indexcache.sglang.probes import WARM_UP

if TYPE_CHECKING:
    import requests

logger = logging.getLogger(__name__)

MORE = 128  # tokens behind those up to which everything is selected: a block of any size, and rows that are exact
STEPS = 8  # tokens of the answer, as of SGLang's warm-up
_TOKENS = (10, 11, 12)  # likewise
_TRIES, _SECONDS = 120, 600
_applied: list[bool] = []


def hook() -> None:
    """Send the prompt to HTTP servers of this process, once they are up.

    An `Engine` has no HTTP server and no warm-up: SGLang's module of it is not there, and is not imported.
    """
    if _applied or f"sglang.{WARM_UP.module}" not in sys.modules:
        return
    hooks = Hooks()
    hooks.add("AROUND", WARM_UP, _around)
    hooks.apply()
    _applied.append(True)


def _around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = bound_to(original, args, kwargs)
    given = bound.arguments
    plan = engines.plan_of(given["server_args"])
    if plan is not None and plan.serves and not plan.pattern.dense and not plan.pattern.is_full:
        given["execute_warmup_func"] = partial(run, plan.selects_after, given["execute_warmup_func"])
    return original(*bound.args, **bound.kwargs)


def run(selects_after: int, theirs: Callable[[Any], bool], server_args: Any) -> bool:
    """Send the prompt, then run SGLang's warm-up; return whether that succeeded.

    A prompt that is not answered is a warning: indexers are counted in the first prompts that are long enough then.
    """
    try:
        _send(selects_after, server_args)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        logger.warning("indexcache: no warm-up prompt that selects (%s): the first long prompts are counted", reason)
    return theirs(server_args)


def _send(selects_after: int, server_args: Any) -> None:
    import requests

    mode = getattr(server_args, "disaggregation_mode", "null")
    if mode == "decode":  # it reads no prompts
        return
    with requests.Session() as session:
        session.trust_env = False  # no proxy is asked for this machine
        session.verify = server_args.ssl_ca_certs or not server_args.ssl_certfile
        if server_args.api_key:
            session.headers["Authorization"] = f"Bearer {server_args.api_key}"
        url = server_args.url()
        if not _answer_of(session, f"{url}/model_info")["is_generation"]:
            return
        room = int(_answer_of(session, f"{url}/server_info")["max_req_input_len"]) - STEPS
        length = min(selects_after + MORE, room)
        if length <= selects_after:
            logger.warning(
                "indexcache: no warm-up prompt that selects: one has at most %d tokens, a selection %d",
                room,
                selects_after,
            )
            return
        for body in bodies(length, data_parallel_ranks(server_args), mode != "null"):
            seconds = float(os.environ.get("SGLANG_WARMUP_TIMEOUT") or -1)
            reply = session.post(f"{url}/generate", json=body, timeout=seconds if seconds > 0 else _SECONDS)
            if reply.status_code != requests.codes.ok:
                raise RuntimeError(f"{reply.status_code}: {reply.text}")
    logger.info("indexcache: a warm-up prompt of %d tokens was answered", length)


def bodies(length: int, replicas: int, handed_over: bool) -> list[dict[str, Any]]:
    """Return requests whose prompts have `length` tokens: one for each data-parallel rank.

    Args:
        length: number of tokens.
        replicas: number of them.
        handed_over: whether a decode server would take over; none does, as in SGLang's own warm-up.
    """
    prompts = [[_TOKENS[(at + number) % len(_TOKENS)] for at in range(length)] for number in range(replicas)]
    sampling = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
    if not handed_over:
        return [{"input_ids": prompts if replicas > 1 else prompts[0], "sampling_params": sampling}]
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return [
        {
            "input_ids": prompt,
            "sampling_params": sampling,
            "bootstrap_host": FAKE_BOOTSTRAP_HOST,
            "bootstrap_room": number,
            **({"routed_dp_rank": number} if replicas > 1 else {}),
        }
        for number, prompt in enumerate(prompts)
    ]


def _answer_of(session: requests.Session, url: str) -> dict[str, Any]:
    """Return what a server says, waiting until it is there."""
    import requests

    for left in reversed(range(_TRIES)):
        try:
            reply = session.get(url, timeout=30)
            if reply.status_code == requests.codes.ok:
                found: dict[str, Any] = reply.json()
                return found
            reason = f"{reply.status_code}: {reply.text}"
        except requests.exceptions.ConnectionError as error:
            reason = str(error)
        if left:
            time.sleep(1)
    raise RuntimeError(reason)
