"""A server is ready once every scheduler has sent its proof, and says why it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache import Pattern
from sglang_indexcache.io import refusal
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import RAN_INDEXER, WOULD_RUN
from sglang_indexcache.serving import ready
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.requested import Request
from tests.core.test_serving import PATTERN, PROVEN, plan


def test_a_scheduler_that_is_ready_sends_its_proof(tmp_path: Path) -> None:
    info: dict[str, Any] = {"status": "ready"}
    server_args = SimpleNamespace(_indexcache=Request(asked=Asked(pattern="p"), proofs=str(tmp_path)))
    ready.report(plan(PROVEN), info, SimpleNamespace(dp_rank=1, server_args=server_args))
    [left] = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert info["indexcache"] == left and left["dp_rank"] == 1 and left["pattern"] == "FSSFSS"


def test_the_server_waits_for_every_proof() -> None:
    own = {**PROVEN.status("p"), "dp_rank": 0}
    other = {**own, "dp_rank": 1}
    ready.check(PATTERN, [own, own], [], 1)  # two tensor-parallel ranks
    ready.check(PATTERN, [None], [own, other, other], 2)  # a data-parallel controller says nothing
    ready.check(PATTERN, [None], [own], 2, together=True)  # the other rank of attention is on another node
    with pytest.raises(ProofError, match="has not proven"):
        ready.check(PATTERN, [None], [], 2, together=True)
    for sent, left, replicas in (([own, None], [own], 1), ([], [], 1), ([None], [own], 2), ([None], [], 2)):
        with pytest.raises(ProofError, match="has not proven that it runs the pattern; expected the plugin"):
            ready.check(PATTERN, sent, left, replicas)
    wrong = {**own, "pattern": "FFFFFF", "fingerprint": Pattern("FFFFFF").fingerprint}
    with pytest.raises(ProofError, match="a scheduler runs FFFFFF, the pattern is FSSFSS"):
        ready.check(PATTERN, [own, wrong], [], 1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp_size": 2, "enable_dp_attention": True},
        {"dp_size": 2, "attn_dp_size": 1, "enable_dp_attention": True},
        {"dp_size": 1, "attn_dp_size": 2, "enable_dp_attention": False},  # as SGLang 0.5.23 would have it written
    ],
)
def test_ranks_of_attention_prove_it_together_however_they_are_asked_for(sizes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**PROVEN.status("p"), "dp_rank": 1}))
    launched = SimpleNamespace(scheduler_infos=[{"status": "ready"}])  # of a data-parallel controller
    ready._check_node(plan(PROVEN), SimpleNamespace(**sizes), launched, tmp_path)
    (tmp_path / "a.json").unlink()
    with pytest.raises(ProofError, match="has not proven"):
        ready._check_node(plan(PROVEN), SimpleNamespace(**sizes), launched, tmp_path)


def test_the_line_of_a_refused_scheduler_is_the_last_that_a_launch_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang prints at length that a process ended; whoever reads the end of a log reads why."""
    server_args = SimpleNamespace(_indexcache=Request(asked=Asked(pattern="p")))

    def start(refused: bool) -> Any:
        if refused:
            with pytest.raises(SystemExit):  # in a process of its own
                refusal.refuse(f"layer 1 {WOULD_RUN} F")
            capsys.readouterr()
        raise RuntimeError("Initialization failed")

    with pytest.raises(SystemExit, match="2"):
        ready.launch(plan(PROVEN), server_args, lambda: start(True))
    assert capsys.readouterr().err == f"indexcache: layer 1 {WOULD_RUN} F\n"
    for _ in range(2):  # what one launch left is not the next one's
        with pytest.raises(RuntimeError, match="Initialization failed"):
            ready.launch(plan(PROVEN), server_args, lambda: start(False))
    assert refusal.LEFT_VARIABLE not in os.environ and not Path(server_args._indexcache.proofs).exists()


@pytest.mark.parametrize("refused", [True, False])
def test_the_line_of_a_scheduler_that_is_refused_while_it_serves_is_the_last(
    refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its first passes, say: SGLang then kills its processes, and itself."""
    done: list[Any] = []
    monkeypatch.setattr(ready, "_kept", [])
    monkeypatch.setattr(ready, "_check_node", lambda *args: None)
    monkeypatch.setattr(ready.os, "kill", lambda *args: done.append(args))
    server_args = SimpleNamespace(_indexcache=Request(asked=Asked(pattern="p")))
    ready.launch(plan(PROVEN), server_args, list)
    folder = Path(server_args._indexcache.proofs)
    if refused:
        monkeypatch.setenv(refusal.LEFT_VARIABLE, str(folder / "refused"))  # as the scheduler was started with
        with pytest.raises(SystemExit):
            refusal.refuse(f"layer 3 {RAN_INDEXER} 0 times")
        capsys.readouterr()

    def sglangs(parent_pid: int | None, include_parent: bool = True, **by: Any) -> None:
        print("SGLang says at length", file=sys.stderr)
        done.append((parent_pid, include_parent))

    ready.kill(sglangs, 1)  # another process
    ready.kill(sglangs, os.getpid(), False)
    ready.kill(sglangs, os.getpid())
    me, said = os.getpid(), "SGLang says at length\n" * 3
    assert done[:2] == [(1, True), (me, False)]
    if refused:
        assert done[2:] == [(me, False), (me, signal.SIGKILL)] and not folder.exists()
        said += f"indexcache: layer 3 {RAN_INDEXER} 0 times\n"
    else:
        assert done[2:] == [(me, True)] and folder.exists()
        ready._forget()
        assert not folder.exists()
    assert capsys.readouterr().err == said
