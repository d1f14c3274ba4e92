"""The SGLang plugin on stand-ins: inert without a pattern, one line and an exit where it can't be exact.

The same against real SGLang is in tests/live.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern, __version__, plugin, serving
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io import refusal
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import NO_INDEXER, NOT_LOADED, WOULD_RUN
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving import engines, identity, proof, ranks
from sglang_indexcache.serving.preflight import Preflight
from sglang_indexcache.serving.proof import effective_roles, mark_unloaded, mismatch
from sglang_indexcache.serving.proven import Proof, ProofHolder
from sglang_indexcache.serving.ranks import MEET_VARIABLE, RankReport, _meet_seconds, disagreement
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.hooks import refusing, refusing_around
from sglang_indexcache.sglang.probes import SglangError, SglangSource
from tests.conftest import TOPK, tiny_config

PATTERN = Pattern("FSSFSS")
SPEC = PatternSpec("deploy.yaml@1/3", pattern_file(PATTERN, tiny_config()))
PROVEN = ProofHolder()
PROVEN.set(Proof(PATTERN, 6, 2))


@pytest.mark.parametrize("error", [AttributeError("gone"), KeyError("BEFORE"), OSError(5, "bad"), ImportError("x")])
def test_whatever_goes_wrong_while_the_plugin_registers_ends_the_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(serving, "require", fail)
    monkeypatch.setenv(refusal.PATTERN_VARIABLE, "p.yaml")
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and lines[0].startswith("Traceback")
    assert lines[-1].startswith(f"indexcache: the plugin could not be registered: {type(error).__name__}")


@pytest.mark.parametrize("error", [AttributeError("gone"), KeyError("BEFORE"), OSError(5, "bad disk")])
def test_whatever_goes_wrong_in_a_hook_ends_the_process(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise error

    for guard, args in ((refusing, ()), (refusing_around, (print,))):
        with pytest.raises(SystemExit):
            guard(fail)(*args)
        assert capsys.readouterr().err.splitlines()[-1].startswith("indexcache: hook tests.core.test_serving")


def test_what_fails_inside_what_a_hook_is_around_is_not_ours() -> None:
    def around(original: Any) -> Any:
        return original()

    def original() -> None:
        raise KeyError("of SGLang")

    with pytest.raises(KeyError, match="of SGLang"):
        refusing_around(around)(original)


def test_in_another_thread_the_process_ends_too() -> None:
    code = "import threading, time; from sglang_indexcache.io.refusal import refuse\n"
    code += "threading.Thread(target=refuse, args=('no',)).start(); time.sleep(600)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (2, "indexcache: no\n")


def test_the_plugin_can_be_loaded_where_the_package_is_broken(tmp_path: Path) -> None:
    """SGLang logs an entry point that can't be loaded, and serves on: what is broken must show while it registers."""
    (tmp_path / "pydantic.py").write_text("raise ImportError('no wheel for this machine')")
    code = "from sglang_indexcache.plugin import register; print('loaded', flush=True); register()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "SGLANG_INDEXCACHE_PATTERN": "p.yaml"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 2 and result.stdout == "loaded\n"
    assert result.stderr.splitlines()[-1].startswith("indexcache: the plugin could not be registered: ImportError")


def test_the_entry_point_is_declared() -> None:
    from importlib.metadata import entry_points

    [entry] = [item for item in entry_points(group="sglang.srt.plugins") if item.name == "indexcache"]
    assert entry.load() is plugin.register


# -- the proof


class Attention(nn.Module):
    """Carries what SGLang's DSA attention modules carry."""

    def __init__(self, layer_id: int, role: str, indexer: bool = True, is_nextn: bool = False) -> None:
        super().__init__()
        self.layer_id, self.skip_topk, self.next_skip_topk = layer_id, role == "S", False
        self.indexer, self.is_nextn = (nn.ModuleDict({"wk": nn.Linear(2, 2)}) if indexer else None), is_nextn


class Decides(Attention):
    """Carries SGLang's own decision, too, as from 0.5.15 on."""

    ignores = False

    def should_run_indexer(self, carried: Any = None) -> bool:
        return self.ignores or not self.skip_topk


def loaded(roles: str, first: int = 0, **options: Any) -> nn.Module:
    return nn.ModuleList([nn.Sequential(Attention(first + i, role, **options)) for i, role in enumerate(roles)])


def test_a_model_that_runs_the_pattern_is_proven_so() -> None:
    model = nn.ModuleList([loaded("FSSFSS"), Attention(6, "S", is_nextn=True), nn.Linear(2, 2)])
    found = effective_roles(DSA.sglang, model)
    assert "".join(found[layer].role for layer in range(6)) == "FSSFSS" and len(found) == 6
    assert mismatch(PATTERN, found) is None
    assert mismatch(PATTERN, effective_roles(DSA.sglang, loaded("FSS", first=3))) is None  # a pipeline stage


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (loaded("FSFFSS"), f"layer 2 {WOULD_RUN} F, the pattern says S"),
        (loaded("FSSSSS"), f"layer 3 {WOULD_RUN} S, the pattern says F"),
        (loaded("FSSFSSS"), "has 7 layers or more that select, the pattern has 6 letters"),
        (loaded("FSSFSS", indexer=False), f"layer 0 is F, but the loaded model has {NO_INDEXER}"),
        (nn.Linear(2, 2), "no attention module that can choose"),
    ],
)
def test_any_difference_is_one_line(model: nn.Module, message: str) -> None:
    line = mismatch(PATTERN, effective_roles(DSA.sglang, model))
    assert line is not None and message in line


def test_indexers_of_f_layers_that_nothing_was_loaded_into_are_found() -> None:
    model = loaded("FSSFSS")
    mark_unloaded(DSA.sglang, model)
    attentions = [item for item in model.modules() if isinstance(item, Attention)]
    assert all(attention.indexer.wk.weight.isnan().all() == (attention.layer_id in (0, 3)) for attention in attentions)
    for attention in attentions[:3]:
        nn.init.zeros_(attention.indexer.wk.weight)
        nn.init.zeros_(attention.indexer.wk.bias)
    nn.init.zeros_(attentions[3].indexer.wk.weight)
    line = mismatch(PATTERN, effective_roles(DSA.sglang, model))
    assert line == f"layer 3 is F, but {NOT_LOADED} wk.bias"
    nn.init.zeros_(attentions[3].indexer.wk.bias)
    assert mismatch(PATTERN, effective_roles(DSA.sglang, model)) is None


def test_ranks_must_agree_and_hold_all_layers() -> None:
    mine, other = PATTERN.fingerprint, Pattern("FFSFSS").fingerprint
    stages = [RankReport(fingerprint=mine, layers=layers) for layers in ((0, 1, 2), (3, 4, 5))]
    assert disagreement(PATTERN, stages) is None
    assert disagreement(PATTERN, stages[:1]) == "layer 3 is on no rank, so its role can't be proven"
    line = disagreement(PATTERN, [stages[0], RankReport(fingerprint=other, layers=(3, 4, 5))])
    assert line == (
        f"rank 1 serves a pattern with fingerprint {other[:16]}, rank 0 one with {mine[:16]}; "
        "expected the same file on every node"
    )
    assert (
        disagreement(PATTERN, [stages[0], RankReport(fingerprint=mine, layers=(3, 4, 5), problem="bad")])
        == "rank 1: bad"
    )


def test_ranks_of_a_search_have_the_same_files_of_the_model() -> None:
    """Each node reads its own; one that serves all F, with the same fingerprint, has none."""
    one, two, none = (RankReport(fingerprint="", layers=tuple(range(6)), files=files) for files in ("a", "b", ""))
    assert disagreement(PATTERN, [one, one]) is None
    line = "rank 1 and rank 0 don't calibrate the same files of a model; expected the same on every node"
    assert disagreement(PATTERN, [one, two]) == disagreement(PATTERN, [one, none]) == line


@pytest.mark.parametrize("text", ["", "0", "-1", "soon"])
def test_how_long_ranks_wait_for_each_other_is_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _meet_seconds() == 300
    monkeypatch.setenv(MEET_VARIABLE, text)
    with pytest.raises(ProofError, match=f"{MEET_VARIABLE} is '{text}', expected a number of seconds"):
        _meet_seconds()


def asking() -> SimpleNamespace:
    return SimpleNamespace(
        pattern=PATTERN, family=DSA, proven=ProofHolder(), asked=Asked(), index_topk=TOPK, weights_sha256=""
    )


def test_a_mismatch_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ranks, "all_ranks", lambda told: [told])
    asked = asking()
    prove = refusing(proof.prove)
    prove(asked, SimpleNamespace(model=loaded("FSSFSS")))
    with pytest.raises(SystemExit) as caught:
        prove(asked, SimpleNamespace(model=loaded("FFFFFF")))
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"indexcache: layer 1 {WOULD_RUN} F, the pattern says S\n"
    assert asked.proven.proof == Proof(PATTERN, 6, 1)


def test_graphs_of_one_rank_that_differ_end_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the rank whose own are right, which would wait for the other one for ever."""
    monkeypatch.setattr(proof, "with_blocks", lambda adapter: adapter)
    for here, error in ((None, None), (None, "the graph of 8 differs"), ("gone", None)):
        told: list[Any] = []

        def both(mine: Any, error: str | None = error, told: list[Any] = told) -> list[Any]:
            told.append(mine)
            return [mine, ((2, 3), (4,)) if isinstance(mine, tuple) else error]

        monkeypatch.setattr(ranks, "all_ranks", both)
        asked = asking()

        def captured(*_: Any, here: str | None = here) -> None:
            if here:
                raise KeyError(here)

        together = SimpleNamespace(selecting={0: 0, 2: 0}, exact=SimpleNamespace(layers=(1,)))
        adapter = SimpleNamespace(captured=captured, group=lambda *_, own=together, **__: own)
        asked.family = SimpleNamespace(sglang=adapter)
        if here or error:
            with pytest.raises(ProofError, match="rank 0: KeyError: 'gone'" if here else f"rank 1: {error}"):
                proof.check_captured(asked, None)
        else:
            proof.check_captured(asked, None)
            assert asked.proven.grouped_layers == [0, 2, 3]  # of all pipeline stages
            assert asked.proven.united_layers == [1, 4]
        assert [item for item in told if not isinstance(item, tuple)] == told[:1]
        monkeypatch.setattr(ranks, "all_ranks", lambda line: pytest.fail("another stage may not be here"))
        if here:
            with pytest.raises(ProofError, match="KeyError"):  # captured again
                proof.check_captured(asked, None)


def test_a_layer_whose_indexer_runs_whatever_its_attribute_says_is_found() -> None:
    """The attribute is right; SGLang's own decision is asked as well."""
    model = nn.ModuleList([Decides(layer, role) for layer, role in enumerate("FSSFSS")])
    assert mismatch(PATTERN, effective_roles(DSA.sglang, model)) is None
    model[1].ignores = True
    with pytest.raises(ProofError, match="layer 1 decides by something else than skip_topk"):
        effective_roles(DSA.sglang, model)


def plan(proven: ProofHolder) -> SimpleNamespace:
    own = {"source": "deploy.yaml@1/3", "serves": True, "check_loaded": lambda: None}
    return SimpleNamespace(pattern=PATTERN, family=DSA, proven=proven, asked=Asked(), **own)


def test_nothing_is_reported_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "plan_of", lambda _: plan(ProofHolder()))
    for hook in (serving.status, serving.scheduler_ready):
        with pytest.raises(ProofError, match="was not compared with the pattern"):
            hook(SimpleNamespace(internal_state={}), SimpleNamespace(dp_rank=None, server_args=None))


# -- status and identity


def test_the_status_is_added_to_the_internal_state(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = SimpleNamespace(internal_state={"tp_size": 1})
    monkeypatch.setattr(engines, "plan_of", lambda _: plan(PROVEN))
    keys = [torch.zeros(3 if layer in (0, 3) else 0, 64 * 132, dtype=torch.uint8) for layer in range(6)]
    pool = SimpleNamespace(index_k_with_scale_buffer=keys, page_size=64)
    arguments = SimpleNamespace(chunked_prefill_size=8192)
    room = {"model_config": SimpleNamespace(context_len=65536), "max_total_num_tokens": 99999}
    runner = SimpleNamespace(model=nn.Module(), token_to_kv_pool=pool, server_args=arguments, **room)
    serving.status(reply, SimpleNamespace(server_args=None, tp_worker=SimpleNamespace(model_runner=runner)))
    assert reply.internal_state["indexcache"] == {
        "pattern": "FSSFSS",
        "fingerprint": PATTERN.fingerprint,
        "retention": 2 / 6,
        "full_layers": 2,
        "shared_layers": 4,
        "source": "deploy.yaml@1/3",
        "version": __version__,
        "proven_ranks": 2,
        "proven": True,
        "saved_kv_bytes_per_token": 4 * 132,
        "saved_weight_bytes": 0,
        "prompt_score_bytes": 0,  # no layers
    }


def test_a_calibration_server_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = SimpleNamespace(internal_state={"tp_size": 1})
    monkeypatch.setattr(engines, "plan_of", lambda _: SimpleNamespace(serves=False))
    serving.status(reply, SimpleNamespace(server_args=None))
    assert reply.internal_state == {"tp_size": 1, "indexcache_calibration": True}


def test_cache_keys_and_handshake_carry_the_pattern() -> None:
    tag = f"indexcache-{PATTERN.fingerprint[:16]}"
    for name, expected in (("glm", f"glm-{tag}"), (None, f"-{tag}")):
        config = SimpleNamespace(model_name=name)
        identity.mark_cache_keys(PATTERN, config)
        assert config.model_name == expected
    arguments = SimpleNamespace(kv_cache_dtype_str="bfloat16")
    for _ in range(2):
        identity.mark_handshake(PATTERN, arguments)
    assert arguments.kv_cache_dtype_str == f"bfloat16+{tag}"


def test_tensors_that_are_not_the_checkpoints_are_left_alone() -> None:
    model = loaded("FSSFSS")
    first = next(item for item in model.modules() if isinstance(item, Attention))
    first.indexer.wk.packed_weight = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    first.indexer.wk.input_scale = nn.Parameter(torch.ones(()))
    mark_unloaded(DSA.sglang, model)
    assert first.indexer.wk.packed_weight.eq(0).all() and first.indexer.wk.input_scale == 1


# -- families


def test_a_model_without_a_configuration_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Preflight(SPEC, Asked(), SglangSource(Path(), "0.0"))
    with pytest.raises(ProofError, match="SGLang built a model without a configuration"):
        _ = check.family
    monkeypatch.setattr(engines, "plan_of", lambda _: check)
    with pytest.raises(ProofError, match="SGLang built a model without a configuration"):
        engines.plan_of_runner(SimpleNamespace(server_args=None, model_config=object()))
    assert engines.plan_of_runner(SimpleNamespace(is_draft_worker=True)) is None  # it runs its own indexer


def test_an_sglang_without_the_familys_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    check = Preflight(SPEC, Asked(), SglangSource.at(tmp_path))
    with pytest.raises(SglangError, match=r"needs sglang.srt.models.deepseek_v2, which is not in SGLang unknown"):
        check.family_at(str(tmp_path))
    with pytest.raises(ProofError):
        _ = check.family
