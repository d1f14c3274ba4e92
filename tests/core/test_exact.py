"""`--indexcache-union-attention` before a model is loaded, and on ranks that were told differently."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_indexcache import Pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.preflight import Preflight, PreflightError
from sglang_indexcache.serving.proven import Proof, ProofHolder
from sglang_indexcache.serving.ranks import RankReport, disagreement
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.probes import Feature
from tests.conftest import tiny_config, tiny_hy_v4_config, tiny_v4_config
from tests.core.test_heads import AnySglang as WithAllNeeded


class AnySglang(WithAllNeeded):
    """Likewise, of what flags need."""

    def refusal(self, feature: Feature) -> str | None:
        return None


def check(folder: Path, config: dict[str, Any], pattern: Pattern | None, **flags: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    spec = None if pattern is None else PatternSpec("x", letters=pattern)
    Preflight(spec, Asked(unions=True, allow_unread=True), AnySglang(Path(), "0.0")).check(
        SimpleNamespace(model_path=str(folder), **flags)
    )


@pytest.mark.parametrize("pattern", [Pattern("FSSFSS"), None])
@pytest.mark.parametrize(
    "flags",
    [
        {"attn_cp_size": 2},
        {"dcp_size": 2},
        {"enable_hisparse": True},
        {"enable_two_batch_overlap": True},
        {"enable_deterministic_inference": True},
    ],
)
def test_what_does_not_go_together(flags: dict[str, Any], pattern: Pattern | None, tmp_path: Path) -> None:
    """Also on a model's own pattern."""
    check(tmp_path, tiny_config(), pattern)
    with pytest.raises(PreflightError, match="can't be combined with"):
        check(tmp_path, tiny_config(), pattern, **flags)


@pytest.mark.parametrize("config", [tiny_v4_config(), tiny_hy_v4_config()], ids=["deepseek-v4", "hy-v4"])
def test_other_models_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """A union of selections has no place for the attention sinks of HY-V4."""
    with pytest.raises(PreflightError, match="--indexcache-union-attention is not served on"):
        check(tmp_path, config, None)


def test_ranks_of_which_only_some_have_it_are_refused() -> None:
    pattern = Pattern("FS")
    one = RankReport(fingerprint=pattern.fingerprint, layers=(0, 1), roles="FS", unions=True)
    assert disagreement(pattern, [one, one]) is None
    assert "rank 1 and rank 0 don't both attend over unions" in str(
        disagreement(pattern, [one, replace(one, unions=False)])
    )


def test_the_status_says_which_layers_and_passes() -> None:
    holder, pattern = ProofHolder(), Pattern("FS")
    holder.set(Proof(pattern, 2, 1))
    assert not {"union_layers", "union_passes"} & holder.status("x").keys()
    holder.united_layers, passes = [0, 1], {"unions": 1, "sglang": 0}
    holder.exact = SimpleNamespace(passes=passes)  # type: ignore[assignment]
    passes["sglang"] = 7
    found = holder.status("x")
    assert found["union_layers"] == [0, 1] and found["union_passes"] == {"unions": 1, "sglang": 7}
