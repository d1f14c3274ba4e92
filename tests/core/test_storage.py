"""HiCache storage whose keys don't show the pattern is refused: a server would find the pages of any pattern there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from indexcache_launch.judge import judge
from indexcache_launch.launch_line import Readings
from sglang_indexcache import Pattern, serving
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io.messages import NOT_COMBINED
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving import engines
from sglang_indexcache.serving.preflight import Preflight, PreflightError
from sglang_indexcache.serving.storage import unmarked
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.probes import SglangSource
from tests.conftest import tiny_config
from tests.core.test_probes import ALL_NEEDS, write_sglang

BACKENDS = {  # what the class does with its configuration
    "prefixed": "self.prefix = '-'.join(config.model_name.split('/'))",
    "unpacked": "rank, name = config.tp_rank, config.model_name\n        self.suffix = f'{name}_{rank}'",
    "used_later": "self.model_name = config.model_name\n\n    def key(self):\n        return self.model_name",
    "kept": "self.model_name = config.model_name",
    "kept_or_empty": "if config: self.model_name = config.model_name\n        else: self.model_name = ''",
    "written": "config.model_name = 'x'",
    "blind": "self.rank = config.tp_rank",
}
GOOD = ("prefixed", "unpacked", "used_later", "file")


@pytest.fixture
def source(tmp_path: Path) -> SglangSource:
    found = write_sglang(tmp_path / "source", ALL_NEEDS)
    cache = found.root / "srt" / "mem_cache"
    (cache / "storage").mkdir(parents=True)
    lines = ["class StorageBackendFactory: ...", "StorageBackendFactory.register_backend("]
    lines += ["    'file', 'sglang.srt.mem_cache.hicache_storage', 'HiCacheFile')"]
    for name, body in BACKENDS.items():
        (cache / "storage" / f"{name}.py").write_text(
            f"class Store:\n    def __init__(self, config):\n        {body}\n", encoding="utf-8"
        )
        lines.append(
            f"StorageBackendFactory.register_backend('{name}', 'sglang.srt.mem_cache.storage.{name}', 'Store')"
        )
    lines.append("StorageBackendFactory.register_backend('gone', 'sglang.srt.mem_cache.storage.gone', 'Store')")
    (cache / "storage" / "backend_factory.py").write_text("\n".join(lines) + "\n")
    (cache / "hicache_storage.py").write_text(
        "class HiCacheStorageConfig:\n    model_name: str\n    def show(self):\n        return self.model_name\n"
        "class HiCacheFile:\n    def __init__(self, config):\n        self.suffix = f'_{config.model_name}'\n"
    )
    return SglangSource.at(tmp_path / "source")


@pytest.mark.parametrize("backend", [*BACKENDS, "file", "gone", "dynamic", "new", None])
def test_a_backend_is_judged_by_what_it_does_with_the_models_name(backend: str | None, source: SglangSource) -> None:
    problem = unmarked(source, backend, None)
    assert (problem is None) == (backend in GOOD)
    if problem is not None:
        known = backend in BACKENDS or backend == "gone"
        said = "its keys don't have the model's name" if known else "nobody here knows what its keys are made of"
        assert said in problem and problem.endswith("expected one of file, prefixed, unpacked, used_later")


def test_the_configuration_of_a_file_storage_does_not_speak_for_it(source: SglangSource) -> None:
    path = source.root / "srt/mem_cache/hicache_storage.py"
    path.write_text(path.read_text().replace("f'_{config.model_name}'", "'_'"))
    assert unmarked(SglangSource.at(source.root.parent), "file", None) is not None


def test_a_name_of_ones_own_takes_the_patterns_place(source: SglangSource) -> None:
    path = source.root / "srt/mem_cache/storage/backend_factory.py"
    path.write_text(path.read_text().replace("'prefixed'", "'tensorcast'", 1))
    found = SglangSource.at(source.root.parent)
    for extra, allowed in (
        (None, True),
        ("{}", True),
        ('{"tensorcast": {"namespace": "a"}}', True),
        ({"tensorcast": {"model_id": "mine"}}, False),
        ('{"model_id": "mine"}', False),
        ("@somewhere.yaml", False),
    ):
        assert (unmarked(found, "tensorcast", extra) is None) is allowed, extra


def test_an_sglang_without_the_factory_is_refused(tmp_path: Path) -> None:
    assert "nobody can see" in str(unmarked(write_sglang(tmp_path, ALL_NEEDS), "file", None))


@pytest.mark.parametrize("backend", ["kept", "file"])
def test_servers_refuse_it_at_the_start_and_when_it_is_attached(
    backend: str, source: SglangSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    plan = Preflight(PatternSpec.read("FSSFSS"), Asked(allow_unread=True), source)
    arguments = SimpleNamespace(
        model_path=str(tmp_path), hicache_storage_backend=backend, hicache_storage_backend_extra_config=None
    )
    monkeypatch.setattr(engines, "_loaded", [plan])
    controller, config = SimpleNamespace(storage_backend_type=backend), SimpleNamespace(model_name="m", extra_config={})
    if backend == "file":
        plan.check(arguments)
        serving._cache_keys(config, controller)
        assert config.model_name.startswith("m-indexcache-")
        return
    with pytest.raises(PreflightError, match=f"--hicache-storage-backend kept {NOT_COMBINED}: in SGLang"):
        plan.check(arguments)
    with pytest.raises(Exception, match=f"HiCache storage kept {NOT_COMBINED}"):
        serving._cache_keys(config, controller)
    full: Any = Preflight(PatternSpec.read("F" * 6), Asked(), source)
    full.check(arguments)  # its pages have all keys, and its name is in them where a backend looks at it
    monkeypatch.setattr(engines, "_loaded", [full])
    serving._cache_keys(config, controller)


@pytest.mark.parametrize("backend", ["hf3fs", "aibrix", "file", "nixl"])
def test_a_launch_line_is_refused_as_the_server_is(
    backend: str, source: SglangSource, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the SGLang at hand; without one nobody can see what its keys are made of, and the line says so."""
    path = source.root / "srt/mem_cache/storage/backend_factory.py"
    path.write_text(path.read_text().replace("'kept'", "'hf3fs'", 1).replace("'prefixed'", "'nixl'", 1))
    line, folder = f"--device cpu --hicache-storage-backend {backend}", source.root.parent
    source, refused = SglangSource.at(folder), backend in ("hf3fs", "aibrix")
    given = f"--hicache-storage-backend {backend} {NOT_COMBINED}: "
    assert check_main(["FSSFSS", "--sglang", str(folder), "--server-args", line]) == refused
    said = capsys.readouterr().out
    assert (f"problem: {given}" in said) is refused
    assert ("not run: storage of HiCache (refused where" in said) is not refused
    assert check_main(["FFFFFF", "--sglang", str(folder), "--server-args", line]) == 0
    readings = Readings.of(line.split(), source)
    assert not judge(Pattern("FSSFSS"), DSA, readings).problems
    assert bool(judge(Pattern("FFFFFF"), DSA, readings, shard=True, source=source).problems) is refused
