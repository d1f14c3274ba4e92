"""Command lines of docs/deploy start real servers on CPUs, answer their probes, and end with the line that says why.

What differs from a cluster: the demo in the place of GLM-5, one rank for `--tp=8`, ports, and SGLang's flags for a CPU.
"""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("sglang")

from indexcache_search import demo
from indexcache_search.engines.own_server import free_port
from scripts.tools import random_models
from sglang_indexcache.check import main as check_main
from sglang_indexcache.http.client import KEY_VARIABLE
from sglang_indexcache.io.messages import OTHER_LENGTH, WOULD_RUN
from tests.live.server import START_TIMEOUT, Server, command, environment, kill_group, running, start
from tests.manifests import IN_CONTAINER, PATTERN, written

pytestmark = pytest.mark.sglang
KEY = "of-the-secret"


@cache
def secret() -> str:
    """The folder that the secret of the keys is mounted as."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    (folder / "server.yaml").write_text(f"api-key: {KEY}\n")
    return str(folder)


def words_of(container: dict[str, Any], **expanded: str) -> list[str]:
    """The command line of a container, on this machine; `expanded` are variables that the cluster sets."""
    words = [*container["command"], *container["args"]]
    for name, value in expanded.items():
        words = [word.replace(f"$({name})", value) for word in words]
    here = {"--model-path=zai-org/GLM-5-FP8": f"--model-path={demo.MODEL}", "--tp=8": "--tp=1"}
    words = [here.get(word, word).replace(IN_CONTAINER, str(PATTERN)) for word in words]
    words = [word.replace("/etc/indexcache-keys", secret()) for word in words]
    assert words[0] == "python3" and words[1] in ("-m", "-c") and not any("$(" in word for word in words)
    return [sys.executable, *words[1:]]


def on_a_cpu(words: list[str], *more: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The launcher, and the flags that `running` starts it with: the last of a flag counts."""
    return tuple(words[:3]), (*words[3:], "--chunked-prefill-size=128", *more)


def probe(server: Server, container: dict[str, Any]) -> None:
    """What the kubelet asks, without a key."""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if name in container:
            with urlopen(server.url + container[name]["httpGet"]["path"], timeout=60) as answer:
                assert answer.status == 200


def completion(url: str, key: str) -> str:
    body = json.dumps({"model": "demo", "prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0}).encode()
    headers = {"content-type": "application/json", "Authorization": f"Bearer {key}"}
    with urlopen(Request(f"{url}/v1/completions", body, headers), timeout=300) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def check_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves the pattern, to those who have the key."""
    with pytest.raises(HTTPError, match="401"):
        completion(server.url, "another")
    assert completion(server.url, KEY).strip()
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert check_main([f"{PATTERN}@1/4", "--server", server.url]) == 0


def test_the_server_of_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [container] = written("one-node/server.yaml").values()
    launcher, flags = on_a_cpu(words_of(container))
    with running(demo.MODEL, tmp_path / "log", *flags, launcher=launcher) as server:
        probe(server, container)
        check_server(server, monkeypatch)


# -- refusals


def ended(words: list[str], folder: Path, **changes: str) -> tuple[int | None, list[str]]:
    """Exit code of a command that ends by itself, and all lines that it printed."""
    process = start(words, folder / "log", **changes)
    try:
        code = process.wait(START_TIMEOUT)
    finally:
        if process.poll() is None:
            kill_group(process)
    return code, (folder / "log").read_text().splitlines()


def shown(lines: list[str]) -> str:
    """What `kubectl describe` shows of a log with FallbackToLogsOnError."""
    return "\n".join(lines[-80:])[-2048:]


def one_node(**replaced: str) -> list[str]:
    [container] = written("one-node/server.yaml").values()
    words = words_of(container)
    for old, new in replaced.values():
        assert any(old in word for word in words)
        words = [word.replace(old, new) for word in words]
    launcher, flags = on_a_cpu(words)
    return command(demo.MODEL, *flags, launcher=launcher)


OTHER = "{other}"


@pytest.mark.parametrize(
    ("replaced", "variables", "line"),
    [
        ((str(PATTERN), "/etc/indexcache/glm.yaml"), {}, "/etc/indexcache/glm.yaml: No such file or directory"),
        (("@1/4", "@1/64"), {}, "retention 1/64 keeps 1 of 16 layers F, but the file has patterns with 2 to 16"),
        ((str(demo.MODEL), "/cache/glm"), {}, "/cache/glm: no such folder, and not a hub id like owner/name"),
        ((str(demo.MODEL), OTHER), {}, OTHER_LENGTH.format(16, 6)),
        (("", ""), {"SGLANG_PLUGINS": "other"}, "SGLANG_PLUGINS leaves the plugin out; expected indexcache in it"),
    ],
    ids=["no pattern file", "no such retention", "no model", "another model", "plugin left out"],
)
def test_a_wrong_container_ends_with_the_line_that_says_so(
    tmp_path: Path, replaced: tuple[str, str], variables: dict[str, str], line: str
) -> None:
    if replaced[1] == OTHER:
        replaced = (replaced[0], str(random_models.build("glm-dense", tmp_path / "model")))
    code, lines = ended(one_node(replaced=replaced), tmp_path, **variables)
    while lines[-1].partition("] ")[2].startswith("kill_process_tree called"):  # SGLang's last word, if it was imported
        lines.pop()
    assert code == 2 and lines[-1].startswith("indexcache: ") and line in lines[-1], lines[-20:]


def test_an_image_without_the_plugin_ends_with_the_line_that_says_so(tmp_path: Path) -> None:
    """Nothing of ours is there to say it; -I leaves out PYTHONPATH, and the module's name is one that no image has."""
    words = one_node(module=("sglang_indexcache.launch_server", "sglang_indexcache_not_here.launch_server"))
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert done.returncode == 1 and "No module named 'sglang_indexcache_not_here'" in done.stderr.splitlines()[-1]


def test_a_refusal_of_a_loaded_model_is_what_kubectl_describes(tmp_path: Path) -> None:
    """A scheduler says it, SGLang tells of the scheduler's end at length, and the main process says it again."""
    code, lines = ended(one_node(), tmp_path, DSA_CPU_BREAK="roles")
    assert code == 2 and f"indexcache: layer 1 {WOULD_RUN} F, the pattern says S" in shown(lines[-3:]), lines[-20:]


# -- several nodes: minutes


@pytest.mark.slow
def test_two_nodes_of_a_leader_worker_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipeline stages, each a node of its own; the worker answers the probes of its pod, too."""
    [container] = written("two-nodes/servers.yaml").values()
    address, cores = f"127.0.0.1:{free_port()}", {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    given = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1"}
    nodes = []
    for index in ("0", "1"):
        words = words_of(container, LWS_WORKER_INDEX=index, **given)
        assert "--dist-init-addr=127.0.0.1:20000" in words
        nodes.append(on_a_cpu(words, f"--dist-init-addr={address}"))
    (launcher, leader), (_, worker) = nodes
    port = free_port()
    line = command(demo.MODEL, *worker, f"--port={port}", launcher=launcher)
    with ExitStack() as stack:
        process = start(line, tmp_path / "worker", **cores)
        stack.callback(kill_group, process)
        server = stack.enter_context(running(demo.MODEL, tmp_path / "leader", *leader, launcher=launcher, **cores))
        probe(server, container)
        probe(Server(f"http://127.0.0.1:{port}", tmp_path / "worker"), container)
        check_server(server, monkeypatch)


@pytest.mark.slow
def test_prefill_and_decode_apart_behind_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)  # test_transfers.py says how to install both
    pytest.importorskip("sglang_router")
    parts, bootstrap = written("prefill-decode/servers.yaml"), free_port()
    [container] = written("one-node/server.yaml").values()
    launcher, flags = on_a_cpu(words_of(container))
    with running(demo.MODEL, tmp_path / "alone", *flags, launcher=launcher) as server:
        expected = completion(server.url, KEY)
    apart = (f"--disaggregation-bootstrap-port={bootstrap}", "--disable-overlap-schedule")
    with ExitStack() as stack:
        found = {}
        for name in ("glm5-prefill", "glm5-decode"):
            launcher, flags = on_a_cpu(words_of(parts[name]), *apart)
            found[name] = stack.enter_context(
                running(demo.MODEL, tmp_path / name, *flags, launcher=launcher, MOONCAKE_PROTOCOL="tcp")
            )
            probe(found[name], parts[name])
        port, words = free_port(), words_of(parts["glm5"])
        here = {f"http://{name}:30000": server.url for name, server in found.items()}
        here |= {"8998": str(bootstrap), "--port=30000": f"--port={port}"}
        assert here.keys() <= set(words)
        with (tmp_path / "router").open("w") as output:
            process = subprocess.Popen(
                [here.get(word, word) for word in words], stdout=output, stderr=output, env=environment()
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        router, end = Server(f"http://127.0.0.1:{port}", tmp_path / "router"), time.monotonic() + START_TIMEOUT
        while True:
            try:
                probe(router, parts["glm5"])
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, router.log.read_text()[-2000:]
                time.sleep(0.5)
        assert completion(router.url, KEY) == expected
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        servers = [word for server in found.values() for word in ("--server", server.url)]
        assert check_main([f"{PATTERN}@1/4", *servers]) == 0
