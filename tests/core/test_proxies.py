"""Servers behind proxies: what a proxy refuses is its own, with the variable that names it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from pydantic import TypeAdapter

from sglang_indexcache import IndexCacheError
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import StatusError, ask
from sglang_indexcache.http.proxy import Proxy, ProxyError

ANY: TypeAdapter[object] = TypeAdapter(object)
SERVER, SECURE = "http://10.0.0.5:3", "https://10.0.0.5:3"
USER, PASSWORD = "ann-of-research", "hunter-22"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("http", "https", "all", "no"):
        for name in (f"{kind}_proxy", f"{kind}_PROXY".upper()):
            monkeypatch.delenv(name, raising=False)


Start = Callable[..., str]


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a proxy that answers everything with the same bytes, and names it in a variable."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def start(answer: bytes, variable: str = "HTTP_PROXY") -> str:
            def serve() -> None:
                while True:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        return
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(answer)

            threading.Thread(target=serve, daemon=True).start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            monkeypatch.setenv(variable, url)
            return url

        yield start
        listener.shutdown(socket.SHUT_RDWR)


def status(code: int, server: str = "squid") -> bytes:
    """An answer without content."""
    return f"HTTP/1.1 {code} X\r\nServer: {server}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


def said(url: str) -> str:
    with pytest.raises(IndexCacheError) as caught:
        ask(url, "/server_info", ANY, seconds=5)
    line = str(caught.value)
    assert "\n" not in line and PASSWORD not in line and USER not in line
    return line


@pytest.mark.parametrize(
    ("variable", "url"),
    [("HTTP_PROXY", SERVER), ("http_proxy", SERVER), ("ALL_PROXY", SERVER), ("HTTPS_PROXY", SECURE)],
)
def test_a_proxy_that_is_not_there(variable: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server was named, with an address that answers everybody else."""
    monkeypatch.setenv(variable, f"http://{USER}:{PASSWORD}@127.0.0.1:9")
    assert said(url) == (
        f"{url}: /server_info: the proxy http://127.0.0.1:9 of {variable} can't be reached: [Errno 111] Connection"
        " refused; expected a proxy that lets it through, or 10.0.0.5 in NO_PROXY"
    )


@pytest.mark.parametrize("code", [403, 502, 503, 504])
def test_what_a_proxy_answers_in_a_server_s_place(code: int, proxy: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key would not help against a 403 of a proxy's."""
    at = proxy(status(code))
    line = said(SERVER)
    assert line.startswith(f"{SERVER}: /server_info: the proxy {at} of HTTP_PROXY answers {code}, or passes that on;")
    assert "SGLANG_API_KEY" not in line and line.endswith("or 10.0.0.5 in NO_PROXY")
    monkeypatch.setenv("HTTPS_PROXY", at)
    assert f"the proxy {at} of HTTPS_PROXY does not connect to it: {code} X; expected" in said(SECURE)


def test_a_proxy_that_wants_a_user(proxy: Start) -> None:
    proxy(status(407), "http_proxy")
    assert "of http_proxy wants a user (407); expected name and password in the URL of http_proxy" in said(SERVER)


@pytest.mark.parametrize("code", [401, 403, 500, 503])
def test_what_sglang_answers_through_a_proxy_is_its_own(code: int, proxy: Start) -> None:
    at = proxy(status(code, "uvicorn"))
    with pytest.raises(
        StatusError, match=f"{SERVER}: /server_info through the proxy {at} of HTTP_PROXY answers {code}"
    ):
        ask(SERVER, "/server_info", ANY)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "can't be read"),
        (b"SSH-2.0-OpenSSH\r\n", "can't be read"),
        (b"HTTP/1.1 200 X\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<html>", "found text/html"),
    ],
)
def test_other_answers_say_through_which_proxy_they_came(answer: bytes, message: str, proxy: Start) -> None:
    """A portal's page is no answer of the server's."""
    at = proxy(answer)
    line = said(SERVER)
    assert line.startswith(f"{SERVER}: /server_info through the proxy {at} of HTTP_PROXY ") and message in line


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("scheme", ["socks5h", "socks5", "socks4", "SOCKS"])
def test_socks_is_refused_with_the_variable(variable: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, f"{scheme}://{USER}:{PASSWORD}@127.0.0.1:9")
    assert said(SERVER) == (
        f"{SERVER}: {variable} names a SOCKS proxy, which is not supported; expected one like http://host:3128, or"
        " 10.0.0.5 in NO_PROXY"
    )


@pytest.mark.parametrize("url", ["http://", "http://a:{}/@host", "ftp://host", "http://host:x", "http://{}?@host:1"])
def test_a_variable_that_names_no_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", url.format(PASSWORD))
    assert "HTTP_PROXY names no proxy; expected one like http://host:3128, or 10.0.0.5 in NO_PROXY" in said(SERVER)
    with pytest.raises(ProxyError):
        Proxy.of(Address.of(SERVER))


@pytest.mark.parametrize(
    ("exceptions", "server", "direct"),
    [
        ("10.0.0.0/8,192.168.0.0/16", SERVER, True),
        ("192.168.0.0/16, 10.0.0.5", SERVER, True),
        ("10.0.0.5:3", SERVER, True),
        ("10.0.0.5:4", SERVER, False),
        ("10.0.0.0/33,nonsense/,", SERVER, False),
        ("10.1.0.0/16", SERVER, False),
        ("*", SERVER, True),
        ("", SERVER, False),
        ("fd00::/8", "http://[fd00::5]:3", True),
        ("[fd00::5]", "http://[fd00::5]:3", True),
        ("fd00::6", "http://[fd00::5]:3", False),
        (".cluster.local", "http://node-1.cluster.local:3", True),
        ("cluster.local", "http://node-1.cluster.local:3", True),
        ("other.local", "http://node-1.cluster.local:3", False),
        ("", "http://localhost:3", True),
        ("", "http://127.0.1.1:3", True),
        ("", "http://[::1]:3", True),
    ],
)
def test_servers_that_are_asked_directly(
    exceptions: str, server: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters except their networks, as curl, Go and requests read them."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", exceptions)
    assert (Proxy.of(Address.of(server)) is None) is direct


def test_which_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in urllib: one for the server's scheme before one for all, lower case before upper case."""
    monkeypatch.setenv("ALL_PROXY", "socks5://other:1")
    monkeypatch.setenv("HTTP_PROXY", "upper:1")
    found = Proxy.of(Address.of(SERVER))
    assert found is not None and str(found) == "the proxy http://upper:1 of HTTP_PROXY"
    monkeypatch.setenv("http_proxy", "http://lower:1")
    found = Proxy.of(Address.of(SERVER))
    assert found is not None and str(found) == "the proxy http://lower:1 of http_proxy"
    assert Proxy.of(Address.of("http://127.0.0.1:1")) is None
