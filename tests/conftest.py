"""Tiny random DSA models, shared by the tests."""

from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import zlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # processes with several threads each slow each other far more than twofold
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import settings

from indexcache_dense.selection import Selection
from sglang_indexcache.families import describe
from sglang_indexcache.io import redaction

if TYPE_CHECKING:
    from indexcache_search.data.tokens import TokenSet
    from indexcache_search.engines.transformers import TransformersEngine

settings.register_profile("indexcache", deadline=None)  # no test asserts a time
settings.load_profile("indexcache")

LAYERS, TOPK, VOCAB = 6, 8, 96
NEWEST = (  # files that run with the newest of every dependency, too: engine, kernels, commands
    "test_block_decoding",
    "test_deepseek_v4",
    "test_dense_commands",
    "test_engine",
    "test_indexers",
    "test_kernels",
    "test_kernels_transformers",
    "test_key_commands",
    "test_keys",
    "test_minimax_engine",
    "test_names_of_transformers",
    "test_offloaded",
    "test_pages",
    "test_pattern_file",
    "test_roles",
    "test_search",
)
ARCHITECTURES = {"glm_moe_dsa": "GlmMoeDsaForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}


# A shell starts what runs in its background with SIGINT ignored, and commands under test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart() -> None:
    """Prepare Triton for its interpreter in the process that runs tests; one that only starts others imports little."""
    _prepare_triton()


@cache
def _prepare_triton() -> None:
    import torch

    if not torch.cuda.is_available() and find_spec("triton") is not None and find_spec("sglang") is None:
        os.environ["TRITON_INTERPRET"] = "1"  # for the functions of Triton itself, whatever imports it first
        import triton.language  # noqa: F401

        del os.environ["TRITON_INTERPRET"]
        _look_through_triton_once()


def _look_through_triton_once() -> None:
    """For each call of a device function its interpreter looks through the language: a third of what kernels take."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(package):
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins


def left_out(file: Path, asked: str) -> bool:
    """Return whether a file has no test of the marker `newest` or `sglang`, by its text alone."""
    listed = asked == "newest" and file.stem in NEWEST
    return not listed and f"mark.{asked}" not in file.read_text()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for nothing: all of them take each process 10 to 30 seconds."""
    asked, _, _ = config.option.markexpr.partition(" and ")
    if asked not in ("newest", "sglang") or not collection_path.match("test_*.py"):
        return None
    return left_out(collection_path, asked) or None  # `None` leaves it to others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of those files, but for slow ones: they repeat others."""
    for item in items:
        if item.path.stem in NEWEST and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.newest)


def pytest_collection_finish() -> None:
    """Leave out of Python's garbage collections what was imported: of some 700,000 objects each costs half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let it be collected at the end: Triton's library reports what is left over."""
    gc.unfreeze()


def tiny_config(model_type: str = "glm_moe_dsa", layers: int = LAYERS, **changes: Any) -> dict[str, Any]:
    """config.json of a random model: two dense layers, then mixtures of experts; 32 index heads avoid score ties."""
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "index_topk": TOPK,
        "index_head_dim": 16,
        "index_n_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


MLA = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}


def tiny_mla_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of a random dense model with MLA; of DeepSeek-V2, whose router DSA lacks, without experts."""
    config = {key: value for key, value in tiny_config().items() if not key.startswith("index_")}
    dense = LAYERS if model_type == "deepseek_v2" else 2
    kinds = {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (LAYERS - dense)}
    own = kinds if model_type == "glm4_moe_lite" else {"first_k_dense_replace": dense}
    name = {"architectures": [f"{MLA[model_type]}ForCausalLM"], "model_type": model_type}
    return {**config, **own, **name, **changes}


V4_LAYERS = (2, 4, 6, 7)  # that have an indexer


def tiny_hy_v4_config(**changes: Any) -> dict[str, Any]:
    return {**tiny_config(**changes), "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4"}


def tiny_v4_config(**changes: Any) -> dict[str, Any]:
    """config.json of a random DeepSeek-V4, with the keys of a release: window, compressed and indexed layers."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 4, 0],  # the last one is of a NextN layer
        "compress_rope_theta": 160000,
        "rope_theta": 10000,
        "index_topk": TOPK,
        "index_head_dim": 16,
        "index_n_heads": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "hc_mult": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


DENSE = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "mistral": "Mistral"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PAGES = Selection(page_tokens=4, pages=4, recent_pages=1, sink_pages=0, score="token_max")


def tiny_dense_config(model_type: str = "llama", layers: int = LAYERS, **changes: Any) -> dict[str, Any]:
    """config.json of a random dense model whose heads share keys in pairs."""
    return {
        "architectures": [f"{DENSE[model_type]}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **(EXPERTS if model_type == "qwen3_moe" else {}),
        **changes,
    }


def tiny_model(config: dict[str, Any], seed: int = 0) -> Any:
    """A random model in evaluation mode, float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()


def save_model(config: dict[str, Any], folder: Path) -> Path:
    """A random model in `folder`, with `config` as its config.json."""
    tiny_model(config).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def made_up(*key: object) -> int:
    """A number that looks random, and is the same in every process, as Python's `hash` of strings is not."""
    return zlib.crc32(repr(key).encode())


def tiny_engine(config: dict[str, Any], **options: Any) -> TransformersEngine:
    from indexcache_search.engines.transformers import TransformersEngine

    return TransformersEngine(tiny_model(config), describe(config, "tiny"), **options)


def random_tokens(
    sequences: int = 3, seq_len: int = 40, seed: int = 0, sources: int = 1, first_sparse_position: int = TOPK
) -> TokenSet:
    """Random sequences; every target that is predicted from `first_sparse_position` on is scored."""
    from indexcache_search.data.tokens import TokenSet

    tokens = np.random.default_rng(seed).integers(3, VOCAB, (sequences, seq_len)).astype(np.int32)
    scored = np.broadcast_to(np.arange(seq_len) > first_sparse_position, tokens.shape).copy()
    return TokenSet(tokens, scored, np.arange(sequences) % sources, tuple(f"source {i}" for i in range(sources)))


@pytest.fixture(autouse=True)
def forgotten_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests kept secret: it may be a word in what this test expects."""
    monkeypatch.setattr(redaction, "_known", set())


@pytest.fixture(autouse=True)
def settings_of_pytorch() -> Iterator[None]:
    """Each test leaves PyTorch's settings as it found them: none passes or fails for what ran before it."""
    before = _settings_of_pytorch()
    yield
    assert _settings_of_pytorch() == before


def _settings_of_pytorch() -> dict[str, Any]:
    import torch

    return {
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """Figures are made and not drawn: half the time of a tiny search. test_page_in_browser looks at pictures."""

    def savefig(figure: Any, file: Any, **options: Any) -> None:
        file.write("<svg></svg>")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", savefig)
        yield


@pytest.fixture(params=list(ARCHITECTURES), ids=["GLM-5", "DeepSeek-V3.2"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """config.json of each architecture."""
    return tiny_config(request.param)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GLM-5 model on disk."""
    return save_model(tiny_config(), tmp_path_factory.mktemp("tiny-glm"))


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random dense model on disk."""
    return save_model(tiny_dense_config(), tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of token ids, enough for a few calibration and held-out sequences."""
    path = tmp_path_factory.mktemp("data") / "tokens.jsonl"
    rows = np.random.default_rng(1).integers(3, VOCAB, (24, 32)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path
