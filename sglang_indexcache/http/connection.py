"""Connections whose answers are bounded: in seconds, in bytes, and in how slowly they may come."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import httpcore

from sglang_indexcache.http.address import Address
from sglang_indexcache.http.proxy import Proxy

BEGUN_SECONDS = 8.0  # an answer that has begun is whole by then
BYTES_A_SECOND = 64 << 10  # or goes on at least as fast


class NoProxyError(httpcore.ProxyError):
    """A proxy to which there is no connection."""


class BudgetError(Exception):
    """An answer that has more bytes than it may have, or does not end in time."""


class AnswerBudget:
    """The limits of one answer.

    Args:
        seconds: for everything, from the connection to the last byte.
        max_bytes: largest number of bytes that are received.
        trickles: the answer may come as slowly as `seconds` allow, as a stream of tokens does.
    """

    def __init__(self, seconds: float, max_bytes: int, trickles: bool = False) -> None:
        self._seconds, self._max_bytes, self._trickles = seconds, max_bytes, trickles
        self._end, self._received = time.monotonic() + seconds, 0
        self._begun: float | None = None

    def left(self) -> float:
        """Return the seconds until the next bytes have to be there.

        Raises:
            BudgetError: if that time has passed.
        """
        end = self._end
        if self._begun is not None and not self._trickles:
            end = min(end, self._begun + BEGUN_SECONDS + self._received / BYTES_A_SECOND)
        left = end - time.monotonic()
        if left <= 0:
            raise self.late()
        return left

    def late(self) -> BudgetError:
        """Return the error of an answer that came too late."""
        if self._begun is not None and time.monotonic() < self._end:
            return BudgetError(f"gave {self._received} bytes in {BEGUN_SECONDS:g} s and more, and no whole answer")
        return BudgetError(f"gave no whole answer within {self._seconds:g} s")

    def receive(self, count: int) -> None:
        """Count received bytes.

        Raises:
            BudgetError: if there are too many.
        """
        self._begun = time.monotonic() if self._begun is None else self._begun
        self._received += count
        if self._received > self._max_bytes:
            raise BudgetError(f"answers with more than {self._max_bytes} bytes")

    def begin_anew(self) -> None:
        """Begin anew after a proxy's answer."""
        self._begun = None


class _Stream(httpcore.NetworkStream):
    """A stream that keeps to a budget, whatever timeouts it is given."""

    def __init__(self, inner: httpcore.NetworkStream, budget: AnswerBudget) -> None:
        self._inner, self._budget = inner, budget

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        content = self._inner.read(max_bytes, self._budget.left())
        if content:
            self._budget.receive(len(content))
        return content

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._budget.left())

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        self._budget.begin_anew()
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, self._budget.left()), self._budget)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    def __init__(self, budget: AnswerBudget, proxy: Proxy | None) -> None:
        self._budget, self._proxy = budget, proxy

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            inner = httpcore.SyncBackend().connect_tcp(host, port, self._budget.left(), local_address, socket_options)
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            if self._proxy is None:
                raise
            raise NoProxyError(str(error)) from None
        return _Stream(inner, self._budget)


def connections(address: Address, budget: AnswerBudget) -> httpcore.ConnectionPool:
    """Return the connections to `address`: direct, or through the proxy that the environment names.

    Raises:
        ProxyError: if the environment names none that can be used.
    """
    certificates = _certificates() if address.label.startswith("https") else None  # they take 30 ms to load
    proxy = Proxy.of(address)
    backend = _Backend(budget, proxy)
    if proxy is None:
        return httpcore.ConnectionPool(certificates, network_backend=backend)
    user = proxy.address.authorization
    headers = [] if user is None else [("Proxy-Authorization", user)]
    return httpcore.HTTPProxy(
        proxy.address.label, proxy_headers=headers, ssl_context=certificates, network_backend=backend
    )


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
