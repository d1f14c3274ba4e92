"""Command lines of a calibration server: what is missing or too many, one line each."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache.calibration.preflight import Calibration, CalibrationError
from sglang_indexcache.checkpoint.checkpoint import weights_digest
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.io.messages import MODEL_CHANGED
from sglang_indexcache.sglang.probes import SglangSource

GOOD = {"disable_radix_cache": True, "enable_fp32_lm_head": True, "host": "127.0.0.1", "model_path": "x"}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    def checked(family: Family | None = None, **flags: Any) -> None:
        monkeypatch.setattr(Calibration, "family_at", lambda *_: family or DSA)
        Calibration(SglangSource(Path(), "0.0")).check(SimpleNamespace(**{**GOOD, **flags}))

    return checked


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"disable_radix_cache": False}, "calibration needs --disable-radix-cache: without it, later chunks"),
        ({"enable_fp32_lm_head": False}, "calibration needs --enable-fp32-lm-head: without it, losses are rounded"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm can't be combined with calibration: drafts"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap can't be combined"),
        (
            {"enable_hierarchical_cache": True},
            "--enable-hierarchical-cache can't be combined with calibration: it keeps KV",
        ),
        ({"use_ray": True}, "--use-ray can't be combined with calibration on this SGLang: needs sglang.srt.ray"),
        ({"enable_lmcache": True}, "--enable-lmcache can't be combined"),
        ({"enable_flexkv": True}, "--enable-flexkv can't be combined"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker can't be combined"),
        ({"enable_hisparse": True}, "--enable-hisparse can't be combined with calibration: it plans its prefetches"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode can't be combined with calibration"),
        ({"tokenizer_worker_num": 2}, "calibration needs --tokenizer-worker-num 1"),
        ({"enable_dp_attention": True}, "calibration needs --enable-dp-lm-head with --enable-dp-attention"),
        ({"host": "0.0.0.0"}, "calibration on --host 0.0.0.0 needs --admin-api-key"),
        (
            {"host": "gpu7", "admin_api_key": "x"},
            "calibration on --host gpu7 needs --api-key: whoever reaches it can read",
        ),
        ({"host": "gpu7"}, "calibration on --host gpu7 needs --admin-api-key"),
        (
            {"family": DEEPSEEK_V4, "pp_size": 2},
            "--pp-size 2 can't be combined with calibration on deepseek_v4: a stage that begins with an S layer",
        ),
        (
            {"family": DEEPSEEK_V4, "attn_cp_size": 2},
            "--attn-cp-size can't be combined with calibration: context parallelism was never tried",
        ),
        (
            {"family": DEEPSEEK_V4, "enable_return_indexer_topk": True},
            "--enable-return-indexer-topk can't be combined with calibration: S layers have no indices",
        ),
    ],
)
def test_refusals(check: Any, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        check(**flags)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "0.0.0.0", "admin_api_key": "secret", "api_key": "secret"},
        {"enable_dp_attention": True, "enable_dp_lm_head": True},
        {"disaggregation_mode": "null", "tokenizer_worker_num": 1, "speculative_algorithm": None},
        {"pp_size": 2, "enable_return_indexer_topk": True},
        {"family": DEEPSEEK_V4, "pp_size": 1, "attn_cp_size": 1, "enable_prefill_cp": False},
    ],
)
def test_what_is_fine(check: Any, flags: dict[str, Any]) -> None:
    check(**flags)


def test_a_model_that_is_replaced_while_a_server_loads_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search would be told the digest of one, and the losses of the other."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    monkeypatch.setattr(SglangSource, "require", lambda *_: None)
    calibration = Calibration(SglangSource(Path(), "0.0"))
    calibration.family_at(str(folder))
    assert calibration.weights_sha256 == weights_digest(str(folder))
    calibration.check_loaded()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(ModelConfigError, match=rf"model\.safetensors: {MODEL_CHANGED}"):
        calibration.check_loaded()
