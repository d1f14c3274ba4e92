"""The configuration file of examples/ is one that SGLang reads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang.srt.server_args import prepare_server_args

pytestmark = pytest.mark.sglang
ROOT = Path(__file__).parents[2]


def test_sglang_reads_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = prepare_server_args(["--config", "examples/serve.yaml"])
    assert (arguments.device, arguments.dsa_topk_backend, arguments.max_total_tokens) == ("cpu", "torch", 4096)
