"""Addresses of servers and texts: what is secret is used, and never shown."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from urllib.parse import quote

import pytest

from sglang_indexcache import IndexCacheError
from sglang_indexcache.http.address import Address, AddressError
from sglang_indexcache.io import redaction
from sglang_indexcache.io.redaction import keep_secret, redacted
from sglang_indexcache.process import exit_line


@pytest.mark.parametrize(
    ("url", "label", "target"),
    [
        ("http://host:30000", "http://host:30000", "http://host:30000/x"),
        ("https://Host/base/", "https://host/base", "https://host/base/x"),
        ("http://me:hunter22@host:1/a?key=sesame&n=1#frag", "http://host:1/a", "http://host:1/a/x?key=sesame&n=1"),
        ("http://[::1]:30000/", "http://[::1]:30000", "http://[::1]:30000/x"),
        ("http://host?key=sesame", "http://host", "http://host/x?key=sesame"),
    ],
)
def test_an_address_is_asked_whole_and_shown_in_part(url: str, label: str, target: str) -> None:
    address = Address.of(url)
    assert str(address) == address.label == label and address.target("/x") == target
    assert "hunter22" not in repr(address) and "sesame" not in f"{address!r} {address}" and "frag" not in repr(address)
    assert Address.of(address) is address
    assert address == Address.of(label)  # the same server, whoever asks it


def test_the_user_of_a_url_is_sent() -> None:
    expected = "Basic " + b64encode("me:p@ss w/ø".encode()).decode()
    assert Address.of(f"http://me:{quote('p@ss w/ø', safe='')}@host").authorization == expected
    assert Address.of("http://host").authorization is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:30000",
        "file:///etc/passwd",
        "ftp://host",
        "http://",
        "http://host:abc",
        "http://host:0",
        "http://host:99999",
        "http://[::1",
        "http://ho st",
        "http://host\n",
        "http://hö.st",
        "http://host\\@other",
        "http://me:hunter22@",
        "http://me:hunt/er22@host",
        "http://me:12/hunter22@host",
        "http://hunter22?x@y@host",
        "hunter22@host:30000",
        "host?key=hunter22",
    ],
)
def test_what_is_no_address_is_refused_unseen(url: str) -> None:
    with pytest.raises(AddressError, match="expected a URL like http://host:30000") as caught:
        Address.of(url)
    assert "hunter22" not in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("can't read http://me:pa/s?s#w@host:1/x?key=v: gone", "can't read http://host:1/x gone"),
        ("s3://key:secret@bucket/x, then more", "s3://bucket/x, then more"),
        ("owner/data?token=abc is no hub id", "owner/data is no hub id"),
        ("token hf_" + "a1B2" * 8 + " is not valid", "token *** is not valid"),
        ("deploy/glm5.yaml@1/4: what? no", "deploy/glm5.yaml@1/4: what? no"),
    ],
)
def test_texts_lose_what_looks_secret(text: str, left: str) -> None:
    assert redacted(text) == left == str(IndexCacheError(text))


def test_texts_lose_what_is_known_to_be_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'pa"ss <&> wörd/1'
    Address.of(f"http://me:{quote(secret, safe='')}@host/?key=open%20sesame")
    keep_secret("k1")  # too short to be told from anything else
    monkeypatch.setenv("HF_TOKEN", "of-the-hub")
    monkeypatch.setenv(redaction.KEY_VARIABLE, "of-the-server")
    forms = [secret, quote(secret, safe=""), json.dumps(secret)[1:-1], b64encode(f"me:{secret}".encode()).decode()]
    for form in [*forms, "open sesame", "open%20sesame", "of-the-hub", "of-the-server"]:
        assert redacted(f"<{form}>") == "<***>", form
    assert redacted("k1 stays") == "k1 stays"


def test_a_traceback_holds_no_secret() -> None:
    keep_secret("hunter22")
    try:
        raise RuntimeError("GET http://me:hunter22@host/?key=1 failed") from KeyError("hunter22")
    except RuntimeError as error:
        error.add_note("asking http://me:other@host")
        line, code = exit_line(error)
    path = Path(line.partition("traceback in ")[2].partition(";")[0])
    saved = path.read_text()
    path.unlink()
    assert code == 70 and "Traceback" in saved and "RuntimeError" in saved
    for text in (line, saved):
        assert "hunter22" not in text and "other@" not in text and "key=1" not in text
