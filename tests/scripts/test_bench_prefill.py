"""The comparison of engines in turns: one that does not start, hangs, dies or lies is named, and the others go on.

The engines are stand-ins in processes like SGLang's; `sglang` and `torch` are modules of a temporary folder.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.bench.serving import engines, prefill

SGLANG = """
import os, time
from pathlib import Path
import yaml

__version__ = "0"

class Engine:
    def __init__(self, **arguments):
        self.arguments, self.cache, self.calls = arguments, set(), 0
        if arguments.get("fail") == "start":
            raise ValueError("20 heads are refused")
        if arguments.get("fail") == "hang at start":
            time.sleep(600)

    def get_server_info(self):
        file = os.environ.get("SGLANG_INDEXCACHE_PATTERN")
        letters = yaml.safe_load(Path(file).read_text())["pattern"] if file else None
        letters = "FFFFFF" if self.arguments.get("fail") == "lie" else letters
        return {"internal_states": [{"indexcache": {"pattern": letters, "proven": True}} if letters else {}]}

    def flush_cache(self):
        self.cache.clear()

    def generate(self, input_ids, sampling_params, stream=False):
        several = isinstance(input_ids[0], list)
        prompts = input_ids if several else [input_ids]
        if max(map(len, prompts)) > 500:
            raise ValueError("longer than the context")
        if not stream:
            salt = len(os.environ.get("SGLANG_INDEXCACHE_PATTERN", "")) > 0
            return {"output_ids": [sum(input_ids) % 97 + salt + n for n in range(24)]}
        self.calls += 1
        if self.arguments.get("fail") == "later" and self.calls == 3:
            print("RuntimeError: CUDA error: out of memory", flush=True)
            os._exit(1)
        return self.stream(prompts, sampling_params["max_new_tokens"], several)

    def stream(self, prompts, steps, several):
        cached = [len(ids) if tuple(ids) in self.cache else 0 for ids in prompts]
        if not self.arguments.get("disable_radix_cache"):
            self.cache |= set(map(tuple, prompts))
        for step in range(1, steps + 1):
            time.sleep(0.0002)
            for index in range(len(prompts)):
                meta = {"completion_tokens": step, "cached_tokens": cached[index]}
                meta |= {"spec_accept_length": 2.5} if self.arguments.get("drafts") else {}
                yield {"meta_info": meta, **({"index": index} if several else {})}
"""
TORCH = """
from types import SimpleNamespace
__version__, cuda = "0", SimpleNamespace(is_available=lambda: False)
"""


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    (folder / "stubs").mkdir()
    (folder / "stubs/sglang.py").write_text(SGLANG)
    (folder / "stubs/torch.py").write_text(TORCH)
    config = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps({**config, "index_topk": 16, "index_n_heads": 32}))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder / "stubs"), *sys.path]))
    given = ("--model", str(folder), "--output", str(folder / "out.json"), "--rounds", "2", "--greedy", "20,30")
    monkeypatch.setattr(sys, "argv", ["prefill", *given, *arguments])
    return prefill.main(), json.loads((folder / "out.json").read_text())


def jump_after(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """Once so many engines are up or lost, a long time has gone by: nobody waits for the one that hangs."""
    gone, ended, ready = [0.0], list[str](), engines.Engine.ready

    def now() -> float:
        return time.monotonic() + gone[0]

    class Output(queue.Queue[str | None]):
        def get(self, block: bool = True, timeout: float | None = None) -> str | None:
            end = now() + (timeout or 0.0)
            while True:
                try:
                    return super().get(timeout=0.05)
                except queue.Empty:
                    if now() >= end:
                        raise

    def counted(engine: engines.Engine, seconds: float = 900) -> dict[str, Any]:
        try:
            return ready(engine, seconds)
        finally:
            ended.append(engine.condition.name)
            gone[0] = 1000.0 * (len(ended) >= others)

    monkeypatch.setattr(engines, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(engines, "queue", SimpleNamespace(Queue=Output, Empty=queue.Empty))
    monkeypatch.setattr(engines.Engine, "ready", counted)


def test_one_bad_engine_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conditions = (
        "plain",
        'refused=plain ++ {"fail": "start"}',
        'hangs=plain ++ {"fail": "hang at start"}',
        'liar=FSSFSS ++ {"fail": "lie"}',
        'later=plain ++ {"fail": "later"}',
        "shared=FSSFSS",
        "ignored-switch=FSSFSS",
    )
    limits = ("--start", "300", "--lengths", "40,2x30,900", "--at-once", "4")
    jump_after(monkeypatch, len(conditions) - 1)
    code, found = run(monkeypatch, tmp_path, *limits, *conditions)
    lost = {name: item["lost"] for name, item in found.items() if "lost" in item}
    assert code == 1 and list(lost) == ["refused", "hangs", "liar", "later"]
    assert lost["refused"] == "ValueError: 20 heads are refused" and lost["hangs"].startswith("no answer within 300 s")
    assert lost["liar"] == "serves FFFFFF, expected FSSFSS" and lost["later"].endswith("out of memory")
    for name in ("plain", "shared", "ignored-switch"):
        times = found[name]["times"]
        assert set(times) == {"40", "2x30"} and all(len(kind) == 2 for cell in times.values() for kind in cell.values())
        assert found[name]["failed"] == {"900": "ValueError: longer than the context"}
        assert found[name]["start"]["serves"] == ("FSSFSS" if name == "shared" else None)
    printed = capsys.readouterr().out
    assert "ignored-switch: answers like plain, so SGLang may ignore its switch" in printed
    base = [line for line in printed.splitlines() if line.split()[1:2] == ["plain"] and "2 rounds" in line]
    assert len(base) == 2 and all(line.endswith("2 rounds: 1.00x, 1.00x") for line in base)
    assert printed.count("% spread") == 2 * 2 * 3 + 2


def test_prompts_of_decoding_alone_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All engines have the prefix cache then, and prompts of other cells are not found in it."""
    engine = ("--engine", '{"disable_radix_cache": true}', "--lengths", "30", "--decode-only", "3x30")
    small, drafts = 'small=plain ++ {"disable_radix_cache": true}', 'drafts=plain ++ {"drafts": true}'
    code, found = run(monkeypatch, tmp_path, *engine, "plain", small, drafts)
    assert code == 0 and set(found["plain"]["times"]["3x30"]) == {"decode_ms", "cached", "accepted"}
    assert found["plain"]["times"]["3x30"]["cached"] == [1, 1] and found["small"]["times"]["3x30"]["cached"] == [0, 0]
    assert found["drafts"]["times"]["3x30"]["accepted"] == [2.5, 2.5]
    printed = capsys.readouterr().out
    assert "100% cached, 2 rounds" in printed and "0% cached, READ ANEW" in printed
    assert "100% cached, 2.50 tokens a step, 2 rounds" in printed


def test_the_limit_ends_a_run_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = 'hangs=plain ++ {"fail": "hang at start"}'
    jump_after(monkeypatch, 1)
    code, found = run(monkeypatch, tmp_path, "--limit", "250", "--lengths", "30", "plain", hanging)
    assert code == 1 and found["hangs"]["lost"] == "not up when the time was over"
    assert "start" in found["plain"] and "stopped after 250 s" in capsys.readouterr().out


def test_a_condition_that_is_none_ends_before_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, tmp_path, "plain", "short=FS")
    assert caught.value.code == 2 and "short: pattern has 2 letters" in capsys.readouterr().err
