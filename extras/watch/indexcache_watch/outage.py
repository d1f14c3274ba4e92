"""Waiting for servers that do not answer for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, cast

from indexcache_search.errors import SearchError
from sglang_indexcache.http.client import NoAnswerError, StatusError
from sglang_indexcache.io.errors import IndexCacheError, one_line

FIRST, LONGEST = 1.0, 60.0  # seconds between tries; each is twice the one before
TRIES = 5  # of a request that may itself be what a server fails on; of all where the watch does not wait for ever
_BUSY = frozenset({429, 502, 503, 504})  # whatever was asked
_TEMPORARY = _BUSY | {408, 500}

Result = TypeVar("Result")


class UnansweredError(Exception):
    """A request that a server fails on again and again while it answers others; its text is one line."""


def temporary(error: IndexCacheError) -> bool:
    """Whether a server may answer later what it does not answer now."""
    return isinstance(error, NoAnswerError) or (isinstance(error, StatusError) and error.code in _TEMPORARY)


def described(error: IndexCacheError) -> str:
    """Return an error with what the server says of it, one line."""
    return one_line(error.whole if isinstance(error, StatusError) else error, 400)


class Outages:
    """Asks again where servers do not answer, after longer and longer pauses.

    Args:
        endless: wait as long as it takes, else `TRIES` times.
        check: asks both servers who they are.
        say: called with one line when an outage begins, and when it ends.
        waited: called with seconds that passed in an outage.
    """

    def __init__(
        self, endless: bool, check: Callable[[], object], say: Callable[[str], None], waited: Callable[[float], None]
    ) -> None:
        self._endless, self._check, self._say, self._waited = endless, check, say, waited

    def run(self, ask: Callable[[], Result]) -> Result:
        """Return what `ask` returns, once servers answer.

        Raises:
            UnansweredError: if `ask` fails again and again while servers answer `check`.
            SearchError: if servers do not answer, and this does not wait for ever.
            IndexCacheError: what `ask` or `check` raise, unless it is `temporary`.
        """
        began = mark = time.monotonic()
        pause, tries, faults = FIRST, 0, 0
        asked: Callable[[], Result | object] = ask
        while True:
            try:
                result = asked()
                if asked is ask:
                    if tries:
                        self._waited(time.monotonic() - mark)
                        self._say(f"both servers answer again, after {time.monotonic() - began:.0f} s")
                    return cast(Result, result)
                asked = ask
                continue
            except (NoAnswerError, StatusError) as error:
                if not temporary(error):
                    raise
                tries += 1
                if asked is ask and not (isinstance(error, StatusError) and error.code in _BUSY):
                    faults += 1
                if not self._endless and tries >= TRIES:
                    raise SearchError(f"{described(error)}; gave up after {TRIES} tries") from None
                if faults >= TRIES:
                    raise UnansweredError(described(error)) from None
                if tries == 1:
                    self._say(f"{described(error)}; waiting until both servers answer")
            time.sleep(pause)
            now = time.monotonic()
            self._waited(now - mark)
            mark, pause, asked = now, min(2 * pause, LONGEST), self._check
