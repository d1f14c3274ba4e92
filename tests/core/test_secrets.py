"""Passwords and keys stay where they were given: in no file, no output, no other process's command line, no other host.

Every command that speaks to servers is run with a user and a query in the URLs, or a key in the environment, against
servers that answer, refuse, break, redirect, and say back what they were sent.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_lab.offload.cli import app as offload
from indexcache_search.cli.evaluate import app as evaluate
from indexcache_search.cli.search import app as search
from indexcache_search.data.sources import rows
from indexcache_search.engines import own_server
from indexcache_search.errors import DataError, SearchError
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check
from sglang_indexcache.families import describe
from sglang_indexcache.io.redaction import KEY_VARIABLE
from sglang_indexcache.io.refusal import ADMIN_KEY_VARIABLE
from tests.conftest import tiny_config
from tests.search.calibration_stub import Stub as Calibration
from tests.search.test_compare import Stub as Completions
from tests.search.test_fuzz import server

USER, PASSWORD, QUERY, KEY = "ann-of-research", "hunter-22", "open-sesame", "key-of-server-1"
BASIC = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SECRETS = (USER, PASSWORD, QUERY, KEY, BASIC)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tracebacks go where they are looked for."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def secret_url(url: str, password: str = PASSWORD) -> str:
    return f"http://{USER}:{password}@{url.removeprefix('http://')}/?key={QUERY}#{QUERY}"


def hides(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


def check_hidden(folder: Path, *outputs: str) -> None:
    """No secret stands in an output, or in a file of `folder`, or in a name of one."""
    assert all(map(hides, outputs)), outputs
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert all(hides(str(path)) and hides(path.read_bytes().decode(errors="replace")) for path in files)


@pytest.fixture
def run(
    tmp_path: Path, model_folder: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a command with some URLs; its exit code, and all it printed."""
    pattern_file(Pattern("FSSFSS"), tiny_config()).save(tmp_path / "p.yaml")
    data = ["--evaluation", str(token_file), "--seq-len", "32", "--model", str(model_folder)]
    small = ["--retain", "1/2", "--num-sequences", "2", "--num-eval-sequences", "2"]
    options: dict[str, tuple[Any, list[str]]] = {
        "search": (
            search,
            [*data, "--calibration", str(token_file), "--engine", "sglang", "--strategy", "uniform", *small],
        ),
        "offload": (offload, [*data, "--num-sequences", "2", "--decode-steps", "4", "--pattern", "a=FSSFSS"]),
        "eval": (evaluate, [*data, "--num-sequences", "2"]),
    }

    def started(command: str, *urls: str) -> tuple[int, str]:
        if command == "check":
            words = [word for url in urls for word in ("--server", url)]
            code = check([str(tmp_path / "p.yaml"), "--json", *words])
            return code, "".join(capsys.readouterr())
        app, words = options[command]
        named = [word for url in urls for word in ("--endpoint", url)]
        result = CliRunner().invoke(app, [*words, *named, "--output", str(tmp_path / "out")])
        return result.exit_code, result.output

    return started


@pytest.fixture
def calibration(model_folder: Path) -> Iterator[Calibration]:
    stub = Calibration()
    stub.config_sha256 = describe(tiny_config(), "tiny").config_sha256
    stub.versions = {**stub.versions, "device": f"CPU of {USER} {PASSWORD}"}  # a server may say back what it was sent
    yield stub
    stub.close()


def test_a_search_leaves_none_and_goes_on_with_another_password(
    run: Callable[..., tuple[int, str]], calibration: Calibration, tmp_path: Path
) -> None:
    code, output = run("search", secret_url(calibration.url))
    assert code == 0, output
    assert {asked[1] for asked in calibration.asked} == {f"Basic {BASIC}"}
    assert all(path.endswith(f"?key={QUERY}") for path, _ in calibration.asked)
    check_hidden(tmp_path, output)
    assert (tmp_path / "out" / "metrics.json").exists() and (tmp_path / "out" / "report.html").exists()
    measured = sum(path.startswith("/generate") for path, _ in calibration.asked)
    code, output = run("search", secret_url(calibration.url, "another-22"))
    assert code == 0 and sum(path.startswith("/generate") for path, _ in calibration.asked) == measured > 0, output
    check_hidden(tmp_path, output)
    assert "another-22" not in output


def test_a_comparison_and_a_check_leave_none(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    stubs = [Completions(1.0, "a"), Completions(0.5, "b")]
    code, output = run("eval", *(secret_url(stub.url) for stub in stubs))
    for stub in stubs:
        stub.close()
    assert code == 0, output
    assert stubs[1].url in (tmp_path / "out" / "eval.json").read_text()
    content = b'{"internal_states": [{}]}'
    with server(lambda to: to.sendall(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n" % len(content) + content)) as url:
        code, checked = run("check", secret_url(url))
        assert code == 1 and f'"{url}"' in checked
    check_hidden(tmp_path, output, checked)


def echo(status: str) -> Callable[[socket.socket], None]:
    """Answer with all secrets, as a server does that says back what it was sent."""
    body = f'{{"error": "{USER} {PASSWORD} {BASIC} {KEY} ?key={QUERY}", "{KEY}": 1}}'.encode()
    head = f"HTTP/1.1 {status}\r\nLocation: http://127.0.0.1:9/{KEY}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    broken = f"{USER}:{PASSWORD} {BASIC} {KEY} {QUERY}\r\n\r\n".encode()
    return lambda connection: connection.sendall(head + body if status[0].isdecimal() else broken)


COMMANDS = ("search", "offload", "eval", "check")


@pytest.mark.parametrize("status", ["200 X", "302 X", "400 X", "401 X", "403 X", "404 X", "409 X", "500 X", "broken"])
def test_failures_leave_none(
    status: str, run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with server(echo(status)) as url:
        for command in COMMANDS:
            for asked in (secret_url(url), url):
                code, output = run(command, *([asked, asked] if command == "eval" else [asked]))
                lines = [line for line in output.splitlines() if line.startswith("indexcache-")]
                assert code == 2 and len(lines) == 1 and url in lines[0], output
                check_hidden(tmp_path, output)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_can_not_be_asked_leaves_none(
    command: str, run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [secret_url("http://127.0.0.1:9"), f"{USER}:{PASSWORD}@host:1", f"http://{USER}:{PASSWORD}/@host"]
    urls += [f"http://host:{QUERY}", f"http://host:1?x=@{QUERY}"][1:]
    for url in urls:
        code, output = run(command, url, url)
        assert code == 2 and "Traceback" not in output
        check_hidden(tmp_path, output)
    monkeypatch.setenv(KEY_VARIABLE, f"{KEY}\n{KEY}")
    code, output = run(command, "http://127.0.0.1:9", "http://127.0.0.1:9")
    assert code == 2 and "the key holds what no header may" in output
    check_hidden(tmp_path, output)
    monkeypatch.delenv(KEY_VARIABLE)
    monkeypatch.setenv("http_proxy", f"http://{USER}:{PASSWORD}@127.0.0.1:9")
    code, output = run(command, "http://host.invalid:1", "http://host.invalid:1")
    assert code == 2 and "host.invalid:1: /" in output
    check_hidden(tmp_path, output)


def test_flags_that_are_none_are_named_without_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(search, [f"--api-key={KEY}"])
    assert result.exit_code == 2 and "no such option: --api-key;" in result.stderr and hides(result.stderr)
    with pytest.raises(SystemExit):
        check(["FSSFSS", "--server", "http://host:1", f"--api-key={KEY}"])
    error = capsys.readouterr().err
    assert "no such option: --api-key" in error and hides(error)


@pytest.mark.parametrize("source", ["https://{}@host/x.jsonl?key={}", "s3://{}@bucket/x", "https:/x?token={}"])
def test_sources_that_are_urls_are_refused_without_secrets(source: str) -> None:
    with pytest.raises(DataError) as caught:
        list(rows(source.format(f"{USER}:{PASSWORD}", QUERY), 0))
    assert hides(str(caught.value))


# -- a server of the search's own


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of SGLang, a process that tells what it was given, its key in several ways, and ends."""
    script = tmp_path / "child"
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        f"key = os.environ['{ADMIN_KEY_VARIABLE}']\n"
        "print('argv', key in open('/proc/self/cmdline').read())\n"
        f"print('other', os.environ.get('{KEY_VARIABLE}'))\n"
        "print(f'server_args={{\"admin_api_key\": {key!r}}}', flush=True)\n"
        "print(f'indexcache: refused {key}', file=sys.stderr)\n"
        "print(len(key))\n"
        "sys.exit(3)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(own_server, "find_spec", lambda name: name)


def test_the_key_of_an_own_server_is_in_no_file_and_no_command_line(
    child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    keys: list[str] = []
    popen = subprocess.Popen

    def spying(*words: Any, env: dict[str, str], **options: Any) -> Any:
        keys.append(env[ADMIN_KEY_VARIABLE])
        assert env.items() >= {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}.items()
        return popen(*words, env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", spying)
    log = tmp_path / "work" / "server.log"
    with (
        pytest.raises(SearchError, match=r"exit code 3: refused \*\*\* \(all of it:"),
        own_server.own_server("owner/model", ["--tp", "2"], log),
    ):
        pass
    said = log.read_text().splitlines()
    assert said[:3] == ["argv False", "other None", "server_args={\"admin_api_key\": '***'}"]
    assert said[-1] == str(len(keys[0])) and log.stat().st_mode & 0o777 == 0o600
    assert keys[0] not in log.read_text()


def test_the_line_for_other_nodes_has_all_flags_and_no_key(child: None, tmp_path: Path) -> None:
    said: list[str] = []
    flags = ["--tp", "16", "--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000", "--json-model", '{"a": "b c"}']
    with (
        pytest.raises(SearchError, match="exit code 3"),
        own_server.own_server("owner/model@v2", flags, tmp_path / "log", warn=said.append),
    ):
        pass
    [line] = said
    assert line.startswith("the server waits for 1 of 2 nodes; start on each, with its own --node-rank: python -m ")
    words = shlex.split(line.partition("node-rank: ")[2])
    launch = ["sglang_indexcache.launch_server", "--indexcache-calibrate", "--model-path", "owner/model"]
    assert words == ["python", "-m", *launch, "--revision", "v2", *flags, "--node-rank", "1"]


@pytest.mark.parametrize("flag", ["--admin-api-key", "--admin", "--api-k", "--api-key=x", "--ssl-keyfile-password"])
def test_an_own_server_takes_no_keys(flag: str) -> None:
    with pytest.raises(SearchError, match=f"^{flag.partition('=')[0]} is given, but a server of the search's own"):
        own_server.check_arguments(["--tp", "8", flag, KEY])
    own_server.check_arguments(["--attention-backend", "dsa", "--tp", "8", "-x", "a"])
