"""KV of one pattern is never taken for another's: storage keys, and servers that hand KV to each other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from indexcache_search.engines.own_server import free_port
from scripts.tools import random_models
from scripts.tools.inprocess import call, load_runner
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern

pytestmark = pytest.mark.sglang

PATTERNS = (Pattern("FSSFSS"), Pattern("FSFSSS"))


KV_TYPES = {"glm-dense": "auto", "deepseek-v4": "fp8_e4m3"}  # as SGLang compares them


@pytest.fixture(scope="module", params=["glm-dense", pytest.param("deepseek-v4", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def files(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("patterns")
    return [write_pattern(pattern, model, folder / f"{pattern}.yaml") for pattern in PATTERNS]


def storage_suffix(model: Path, folder: Path) -> str:
    """What SGLang's file storage adds to every key; the host pool, which needs a GPU, is a stand-in."""
    from types import SimpleNamespace

    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    runner = load_runner(model)
    controller = object.__new__(HiCacheController)
    controller.mem_pool_device = runner.token_to_kv_pool
    controller.mem_pool_host = controller.storage_host_pool = SimpleNamespace(
        layout="page_first", storage_format_tag=None
    )
    controller.storage_backend_type = "file"
    controller.attn_cp_group, controller.enable_storage_metrics, controller.page_size = None, False, 64
    config = controller._generate_storage_config("org/glm", None)
    return str(HiCacheFile(config, file_path=str(folder)).config_suffix)


def test_storage_keys_differ_by_pattern(model: Path, files: list[str], tmp_path: Path) -> None:
    found = [call(storage_suffix, model, tmp_path, SGLANG_INDEXCACHE_PATTERN=file) for file in files]
    assert found == [f"_org-glm-indexcache-{pattern.fingerprint[:16]}" for pattern in PATTERNS]
    assert call(storage_suffix, model, tmp_path) == "_org-glm"


def kv_manager(model: Path, mode: str, port: int) -> Any:
    """SGLang's own base class of all P/D managers, in `mode`, with its bootstrap server at `port`."""
    from types import SimpleNamespace

    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import get_disagg

    runner = load_runner(model)
    arguments = SimpleNamespace(
        engine_rank=0,
        kv_cache_dtype_str=runner.kv_cache_dtype_str,
        kv_layout=None,
        kv_item_lens=[1],
        kv_data_ptrs=[0],
        kv_layer_ids=[0],
        state_types=[],
        state_item_lens=[],
        state_layer_ids=[],
        is_hybrid_mla_backend=False,
        system_dp_rank=0,
        pp_rank=0,
        page_size=64,
        rust_http_port=None,
    )

    class Manager(CommonKVManager):
        def register_buffer_to_engine(self) -> None: ...

    Manager.__abstractmethods__ = frozenset()
    with get_disagg().override(disaggregation_bootstrap_port=port):
        return Manager(arguments, DisaggregationMode(mode), SimpleNamespace(), is_mla_backend=True)


def prefill(model: Path, port: int, stop: str) -> str:
    """Run a bootstrap server and register a prefill rank there until the file `stop` exists."""
    import time

    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    CommonKVBootstrapServer("127.0.0.1", port)  # starts its thread
    kind = kv_manager(model, "prefill", port).kv_cache_dtype_str
    Path(stop + ".ready").write_text("")
    while not Path(stop).exists():
        time.sleep(0.1)
    return str(kind)


def decode(model: Path, port: int) -> str:
    """What a decode server says when it meets the prefill server: an empty line if it takes its KV."""
    import logging

    manager, lines = kv_manager(model, "decode", port), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang_indexcache").addHandler(handler)
    try:
        return "" if manager.try_ensure_parallel_info(f"127.0.0.1:{port}") else "lives on: " + lines[-1]
    except RuntimeError as error:
        return str(error)


def test_prefill_and_decode_servers_with_different_patterns_refuse_each_other(
    kind: str, model: Path, files: list[str], tmp_path: Path
) -> None:
    port, stop = free_port(), tmp_path / "stop"
    ready = Path(f"{stop}.ready")
    answer: list[Any] = []
    thread = threading.Thread(
        target=lambda: answer.append(call(prefill, model, port, str(stop), SGLANG_INDEXCACHE_PATTERN=files[0]))
    )
    thread.start()
    try:
        while not ready.exists() and thread.is_alive():
            thread.join(0.2)
        assert ready.exists()
        same = call(decode, model, port, SGLANG_INDEXCACHE_PATTERN=files[0])
        other = call(decode, model, port, SGLANG_INDEXCACHE_PATTERN=files[1])
        without = call(decode, model, port)
    finally:
        stop.write_text("")
        thread.join()
    assert answer == [f"{KV_TYPES[kind]}+indexcache-{PATTERNS[0].fingerprint[:16]}"]
    assert same == ""
    assert other == (
        f"lives on: indexcache: the prefill server at 127.0.0.1:{port} runs another pattern"
        f" (indexcache-{PATTERNS[0].fingerprint[:16]}), this one {PATTERNS[1]}"
        f" (indexcache-{PATTERNS[1].fingerprint[:16]}): its KV is not taken, and requests that it hands over are"
        " aborted"
    )
    assert without.startswith("KV cache dtype mismatch: prefill server has kv_cache_dtype=" + answer[0])
    assert f"decode server has kv_cache_dtype={KV_TYPES[kind]}." in without
