"""What the tables say of an override is what SGLang's own functions say: its configuration class, then its rule."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from extras.launch.tests.override_spellings import LAYERS, V32, case, slow
from indexcache_launch.reading import READ_VERSIONS, of_version
from indexcache_launch.rules import GLM, HY_V4, readings
from sglang_indexcache.check import main
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import SglangSource
from tests.conftest import tiny_config

pytestmark = pytest.mark.sglang
MODEL_TYPES = {GLM: "glm_moe_dsa", V32: "deepseek_v32", HY_V4: "hy_v4"}


@pytest.fixture(scope="module")
def installed() -> SglangSource:
    found = SglangSource.installed()
    if found is None or found.version not in READ_VERSIONS[READ_VERSIONS.index("0.5.14") :]:
        pytest.skip("no SGLang that was read, with a rule that can be asked")
    return found


def own(folder: Path, architecture: str, config: dict[str, Any], overrides: dict[str, Any]) -> str | None:
    """The roles by SGLang's own `get_config` and `dsa_layer_skips_topk`; `None` where they raise."""
    from sglang.srt.configs.model_config import dsa_layer_skips_topk
    from sglang.srt.utils.hf_transformers.config import get_config

    base = tiny_config(layers=LAYERS) | {"model_type": MODEL_TYPES[architecture]}
    if architecture == HY_V4:
        base |= {"layer_types": None, "mlp_layer_types": None}
    (folder / "config.json").write_text(json.dumps(base | config))
    get_config.cache_clear()  # it takes 1 and true for the same override
    try:
        made = get_config(str(folder), trust_remote_code=False, model_override_args=overrides)
        return "".join("S" if dsa_layer_skips_topk(made, layer) else "F" for layer in range(LAYERS))
    except Exception:
        return None


def test_the_tables_are_sglangs_own_rule(tmp_path: Path, installed: SglangSource) -> None:
    """A table that is out of date would promise a pattern that is not served."""
    seen: Counter[str] = Counter()
    for seed in range(5000, 5400):
        architecture, config, overrides = case(seed)
        found = of_version(readings(architecture, config, overrides), installed.version)
        if found is None:  # HY-V4 before 0.5.20
            continue
        asked = own(tmp_path, architecture, config, overrides)
        assert found.roles == asked, (seed, architecture, config, overrides, found.line)
        assert asked == slow(installed.version, architecture, config, overrides), seed
        seen[architecture] += 1
        seen["refused" if asked is None else found.source or "nothing"] += 1
    assert min(seen[item] for item in (GLM, V32, "refused", "override", "configuration class", "nothing")) > 10


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32"])
def test_the_installed_sglang_answers_for_a_pasted_flag(
    model_type: str, tmp_path: Path, installed: SglangSource, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(model_type)))
    override = {"index_topk_pattern": "FSSFSS"}
    arguments = ["--model", str(tmp_path), FLAG, json.dumps(override)]
    ignored = model_type == "glm_moe_dsa" and READ_VERSIONS.index(installed.version) >= READ_VERSIONS.index("0.5.20")
    assert main(arguments) == int(ignored)
    assert (f"problem: SGLang {installed.version} ignores index_topk_pattern" in capsys.readouterr().out) is ignored
    assert main(["FSSFSS", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["effective"] == "FSSFSS"  # with what the launcher adds
    assert len(report["warnings"]) == int(ignored)


def test_an_installed_sglang_that_was_not_read_is_asked_all_the_same(
    tmp_path: Path, installed: SglangSource, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("deepseek_v32")))
    newer = SglangSource(installed.root, "0.5.99")
    monkeypatch.setattr(SglangSource, "installed", classmethod(lambda cls: newer))
    arguments = ["--model", str(tmp_path), FLAG, '{"index_topk_pattern": "FSSFSS"}']
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "SGLang 0.5.99 says itself that it runs FSSFSS" in lines
    assert "note: SGLang 0.5.99: not read yet; newest read is 0.5.23" in lines
