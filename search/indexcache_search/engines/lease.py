"""The lease of a calibration server, held by this process: no other client switches patterns meanwhile."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from indexcache_search.engines.answers import LEASE, LeaseState
from indexcache_search.engines.control_requests import Control, ServerLostError
from indexcache_search.errors import SearchError
from sglang_indexcache.calibration import protocol
from sglang_indexcache.io.errors import one_line

SECONDS = 30.0  # for an answer
RELEASE_SECONDS = 3.0  # a process that ends does not wait for long
_BEATS = 12  # renewals in the time after which a lease ends
_SHORTEST = 0.02  # seconds between two requests for a lease
_BYTES = 1 << 16


@dataclass
class _Holder:
    """The state that a thread renews a lease with, without a reference to the `HeldLease` itself."""

    control: Control
    seconds: float
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    process: int = field(default_factory=os.getpid)
    held = False  # as far as is known here
    begun = False
    released = False

    def take(self) -> LeaseState:
        """Take the lease or renew it, if nobody else holds it."""
        return self._ask(protocol.LEASE, SECONDS)

    def renew(self) -> None:
        """Renew the lease as long as it is held; a server that is away may come back."""
        while not self.released:
            time.sleep(self.seconds / _BEATS)
            if self.held and not self.released:
                with suppress(ServerLostError, SearchError):
                    self.held = self.take().granted

    def release(self) -> None:
        """Give the lease back; a process that was forked has none."""
        self.held, self.released = False, True
        if self.begun and self.process == os.getpid():
            with suppress(Exception):  # the server may be gone, and forgets the lease after a while
                self._ask(protocol.RELEASE, RELEASE_SECONDS)

    def _ask(self, action: str, patience: float) -> LeaseState:
        holder = {"host": _host(), "process": self.process, "seconds": self.seconds}
        content = {"protocol": protocol.VERSION, "token": self.token, **holder}
        return self.control.ask(protocol.path(action), content, LEASE, patience, _BYTES)


class HeldLease:
    """A lease that a thread renews until it is released: by `release`, without references, or as the process ends.

    It outlives this process, if it is killed, for `seconds`, at most `protocol.LEASE_SECONDS`.
    """

    def __init__(self, control: Control, seconds: float = protocol.LEASE_SECONDS) -> None:
        self._holder, self._lock = _Holder(control, seconds), threading.Lock()
        self.release = weakref.finalize(self, self._holder.release)

    @property
    def token(self) -> str:
        """Return what shows the server that a request comes from the holder."""
        return self._holder.token

    @property
    def held(self) -> bool:
        """Return whether it is held, as far as is known here."""
        return self._holder.held

    def hold(self, notice: Callable[[str], None] = lambda line: None) -> None:
        """Take the lease, unless it is held.

        If another client has it, wait as long as that one does not show that it lives: a search that was killed can be
        run again at once. `notice` is called with one line if that takes long.

        Raises:
            SearchError: if another client holds it, or this one has released it.
            ServerLostError: if the server does not answer.
        """
        holder, url = self._holder, self._holder.control.address.label
        with self._lock:
            if holder.held:
                return
            began, first, told = time.monotonic(), None, False
            while holder.released or not (state := holder.take()).granted:
                if holder.released:
                    raise SearchError(f"{url}: this client has released its lease")
                first, waited = first or state, time.monotonic() - began
                if state.beats != first.beats or waited > 2 * protocol.LEASE_SECONDS:
                    raise SearchError(f"{url}: {held_by(state)}; expected one search a server")
                if not told and waited > 2 * holder.seconds / _BEATS:
                    told = True
                    notice(f"{url}: waiting for a search that seems to be gone: {held_by(state)}")
                time.sleep(max(_SHORTEST, min(holder.seconds / _BEATS / 5, state.ends_in_s)))
            holder.held = True
            if not holder.begun:
                holder.begun = True
                threading.Thread(target=holder.renew, name="indexcache lease", daemon=True).start()

    def lost(self) -> None:
        """Note that the server refused the token: the next `hold` takes the lease anew."""
        self._holder.held = False


def _host() -> str:
    """Return the name of this machine as others may print it."""
    return one_line(socket.gethostname().encode("ascii", "replace").decode(), 100) or "?"


def held_by(state: LeaseState) -> str:
    """Say who holds a lease, by the server's clock."""
    mine = (state.host, state.process) == (_host(), os.getpid())
    return (
        f"process {state.process} on {state.host} has switched its patterns for {state.held_s:.0f} s"
        f"{' (this very process: is the server named twice?)' if mine else ''}; its lease ends in"
        f" {state.ends_in_s:.0f} s unless it renews it"
    )
