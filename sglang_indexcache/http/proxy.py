"""The proxy through which a server is asked, by the environment's variables or the system's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from sglang_indexcache.http.address import Address, AddressError
from sglang_indexcache.io.errors import IndexCacheError

_PORTS = {"http": 80, "https": 443}
_BY_PROXIES = (403, 407, 502, 503, 504)  # codes with which proxies answer in a server's place
_SERVERS = b"uvicorn"  # in the header `Server` of SGLang and vLLM


class ProxyError(IndexCacheError):
    """A setting that names no proxy which can be used."""


@dataclass(frozen=True)
class Proxy:
    """A proxy between us and a server.

    Attributes:
        address: of the proxy; its user is sent to it alone.
        source: the variable that names it, as it is spelled there, or the system's settings.
        server: that is asked.
    """

    address: Address
    source: str
    server: Address

    @classmethod
    def of(cls, server: Address) -> Proxy | None:
        """Return the proxy for `server`; `None` if it is asked directly, as loopback addresses always are.

        Raises:
            ProxyError: if it is none for HTTP, or its URL is invalid.
        """
        parts = urlsplit(server.label)
        host, given = parts.hostname or "", getproxies()
        kind = parts.scheme if given.get(parts.scheme) else "all"
        url = given.get(kind)
        if not url or _is_direct(host, parts.port or _PORTS[parts.scheme], given.get("no", "")):
            return None
        source, expected = _named(kind, url), f"expected one like http://host:3128, or {host} in NO_PROXY"
        scheme, separator, _ = url.partition("://")
        if separator and scheme.lower().startswith("socks"):
            raise ProxyError(f"{server}: {source} names a SOCKS proxy, which is not supported; {expected}")
        try:
            return cls(Address.of(url if separator else f"http://{url}"), source, server)
        except AddressError:
            raise ProxyError(
                f"{server}: {source} names no proxy; {expected}; write special characters of a password as %40"
            ) from None

    def __str__(self) -> str:
        return f"the proxy {self.address} of {self.source}"

    @property
    def way_out(self) -> str:
        """Return what would help if the proxy lets no request through."""
        host = urlsplit(self.server.label).hostname
        return f"expected a proxy that lets it through, or {host} in NO_PROXY"

    def refusal(self, code: int, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Return a line if the proxy may have answered with this code; `None` if it was the server.

        With TLS only the server can answer: a proxy that refuses to connect to it gives no answer at all.
        """
        server = next((value for name, value in headers if name.lower() == b"server"), b"")
        if self.server.label.startswith("https") or code not in _BY_PROXIES or server.lower().startswith(_SERVERS):
            return None
        if code == 407:
            return f"{self} wants a user (407); expected name and password in the URL of {self.source}"
        return f"{self} answers {code}, or passes that on; {self.way_out}"


def _is_direct(host: str, port: int, exceptions: str) -> bool:
    """Return whether `host` is this machine, or one of the exceptions, which may be networks such as 10.0.0.0/8."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost" or bool(proxy_bypass(f"{host}:{port}"))
    if address.is_loopback or (address.version == 4 and proxy_bypass(f"{host}:{port}")):
        return True
    for text in exceptions.split(","):
        try:
            if text.strip() == "*" or address in ip_network(text.strip().strip("[]"), strict=False):
                return True
        except ValueError:  # a name
            continue
    return False


def _named(kind: str, url: str) -> str:
    """Return the variable that has `url`; a name in lower case counts before others."""
    names = [name for name, value in os.environ.items() if name.lower() == f"{kind}_proxy" and value == url]
    return max(names, key=str.islower, default="the system's settings")
