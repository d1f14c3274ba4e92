"""Addresses of servers: the secrets in them are used, and never shown."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.redaction import keep_secret

_EXPECTED = "expected a URL like http://host:30000"
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[\w.-]+)?")
_LONG_NAME = 8  # a user name of so many characters may be a token


class AddressError(IndexCacheError):
    """An invalid URL of a server."""


@dataclass(frozen=True)
class Address:
    """A server's URL.

    Attributes:
        label: scheme, host, port and path: what people, files and logs see, and what identifies the server.
        authorization: value of the `Authorization` header for the URL's user, if there is one.
    """

    label: str
    authorization: str | None = field(default=None, repr=False, compare=False)
    _query: str = field(default="", repr=False, compare=False)

    @classmethod
    def of(cls, url: str | Address) -> Address:
        """Parse `http://user:password@host:port/path?query`; a fragment is dropped.

        Raises:
            AddressError: if `url` is invalid; its text is shown only where nothing in it can be secret.
        """
        if isinstance(url, Address):
            return url
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        beyond = f"{parts.path}{parts.query}{parts.fragment}"
        good = url.isascii() and url.isprintable() and " " not in url and "@" not in beyond and "\\" not in url
        if not good or parts.scheme not in ("http", "https") or port == 0 or not _HOST.fullmatch(host):
            secret = set("@?#") & set(url)
            shown = "a URL with user, query or fragment" if secret else url[:80]
            more = "; write special characters of a password as %40" if "@" in url else ""
            raise AddressError(f"{shown}: {_EXPECTED}{more}")
        netloc = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
        keep_secret(parts.query, parts.fragment, *(value for _, value in parse_qsl(parts.query)))
        authorization = None
        if parts.username or parts.password:
            user, password = unquote(parts.username or ""), unquote(parts.password or "")
            authorization = "Basic " + b64encode(f"{user}:{password}".encode()).decode()
            named = [user] if not password or len(user) >= _LONG_NAME else []
            keep_secret(password, f"{user}:{password}", authorization.partition(" ")[2], *named)
        label = f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}"
        return cls(label, authorization, parts.query)

    def __str__(self) -> str:
        return self.label

    def without(self, ending: str) -> Self:
        """Return the same server with `ending` removed from its path."""
        return replace(self, label=self.label.removesuffix(ending))

    def target(self, path: str) -> str:
        """Return the URL of a request: the server's own path, then `path`, then its query."""
        return self.label + path + (f"?{self._query}" if self._query else "")
