"""MiniMax-M3 is refused by name, and its page says what this SGLang has."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_indexcache.check import main as check_main
from sglang_indexcache.families import describe
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.sglang.probes import Need, SglangSource

_MINIMAX_TEXT = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 60,
    "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_topk_blocks": 16},
}
_MINIMAX_PAGE = "docs/upstream/minimax-m3.md"


@pytest.mark.parametrize(
    "config",
    [
        {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "text_config": _MINIMAX_TEXT,
        },
        {"architectures": ["MiniMaxM3SparseForCausalLM"], **_MINIMAX_TEXT},
        {"architectures": ["MiniMaxM3VLForCausalLM"], **_MINIMAX_TEXT},
        {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "text_config": {**_MINIMAX_TEXT, "use_index_cache": True, "index_topk_freq": 4},
            "index_topk_pattern": "FSSS",
        },
    ],
    ids=["released", "text alone", "saved by transformers", "with other engines' spellings of sharing"],
)
def test_minimax_m3_is_refused_by_name_with_the_page_that_says_why(config: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError) as refused:
        describe(config, "m3")
    line = str(refused.value)
    assert line.startswith("m3: its layers choose blocks for each key head, of which no pattern is served: ")
    assert _MINIMAX_PAGE in line and "\n" not in line and "; expected DeepseekV32ForCausalLM" in line
    page = (Path(__file__).parents[2] / _MINIMAX_PAGE).read_text()
    for name in ("_topk_is_source", "_topk_group_of_layer", "SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ"):
        assert name in page


def test_drafts_of_minimax_m3_and_models_that_hold_one_have_lines_of_their_own() -> None:
    with pytest.raises(ModelConfigError, match="MiniMaxM3MTP drafts for another model"):
        describe({"architectures": ["MiniMaxM3MTP"], "model_type": "minimax_m3_mtp"}, "draft")
    with pytest.raises(ModelConfigError, match="MiniMaxM4ForCausalLM has no attention known here"):
        describe({"architectures": ["MiniMaxM4ForCausalLM"], **_MINIMAX_TEXT}, "next")


def test_the_command_refuses_minimax_m3_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"architectures": ["MiniMaxM3SparseForCausalLM"], **_MINIMAX_TEXT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for asked in (["FSSS"], ["--json-model-override-args", '{"index_topk_freq": 4}']):
        assert check_main([*asked, "--model", str(tmp_path)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and _MINIMAX_PAGE in said.err


def read_version() -> SglangSource:
    source = SglangSource.at_hand(None)
    if source is None or not source.version.startswith("0.5.23"):
        pytest.skip("the page was written about SGLang 0.5.23")
    return source


@pytest.mark.sglang
def test_sglang_has_what_the_page_names() -> None:
    source = read_version()
    backend, operations = "srt.layers.attention.minimax_sparse_backend", "srt.layers.attention.minimax_sparse_ops"
    made = ("index_cache_enabled", "_idx_group_size", "_topk_group_of_layer", "_topk_is_source", "is_gfx95_supported")
    for need in (
        Need(backend, "MiniMaxSparseAttnBackend.__init__", ("runner",), made),
        Need(backend, "MiniMaxSparseAttnBackend.forward_decode", (), ("_decode_topk_buf", "_topk_is_source")),
        Need(f"{operations}.minimax_sparse", "minimax_sparse_prefill", ("cached_topk_idx", "return_topk_idx")),
        Need(f"{operations}.minimax_sparse", "minimax_sparse_decode", ("cached_topk_idx", "topk_out")),
        Need(
            "srt.layers.attention.minimax_sparse_nvfp4_backend",
            "MiniMaxSparseNvfp4AttnBackend._forward",
            ("idx_q",),
            without=("cached_topk_idx", "_topk_is_source"),
        ),
        Need("srt.models.minimax_m3", "MiniMaxM3Attention.maybe_build_fused_qkv_index", (), ("fused_qkv_index_proj",)),
    ):
        assert source.missing(need) is None


class Pool:
    """One key head; nothing is stored."""

    main_pool = SimpleNamespace(head_num=1)

    def set_fused_kv_index_buffer(self, *given: Any) -> None:
        pass

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(8, 1, 4), torch.zeros(8, 1, 4)

    def get_index_k_buffer(self, layer: int) -> Tensor:
        return torch.zeros(8, 1, 4)


class Served:
    """SGLang's backend without its kernels: `choosers` says what each layer attends to, the layer that chose it."""

    def __init__(self, letters: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        module = importlib.import_module("sglang.srt.layers.attention.minimax_sparse_backend")
        operations = importlib.import_module("sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse")
        monkeypatch.setattr(operations, "minimax_sparse_prefill", self.prefill)
        monkeypatch.setattr(operations, "minimax_sparse_decode", self.decode)
        self.modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self.layers = range(3, 3 + len(letters))
        self.choosers: list[int] = []
        self.backend: Any = object.__new__(module.MiniMaxSparseAttnBackend)
        nothing = (
            "is_npu is_hip hisparse_coordinator fp8_attn_gemm use_msa use_dense_sparse_decode _use_msa_decode"
            " indexer_cp _msa_owns_decode _msa_dec_meta _loc_mapping _topk_cache_owner speculative_num_draft_tokens"
        )
        sizes = "_max_seqlen_q _max_seqlen_k block_size_q block_size_k page_size init_blocks local_blocks"
        source = [max(place for place in range(site + 1) if letters[place] == "F") for site in range(len(letters))]
        vars(self.backend).update(
            dict.fromkeys(nothing.split()),
            **dict.fromkeys(sizes.split(), 1),
            kv_pool=Pool(),
            req_to_token=torch.zeros(1, 8, dtype=torch.int32),
            score_type="max",
            topk_blocks=2,
            disable_value_layer_ids=set(self.layers),
            _topk_cache={},
            _decode_topk_buf={},
            # what a plugin would write
            index_cache_enabled=True,
            _idx_group_size=1,
            _topk_is_source={layer: letters[site] == "F" for site, layer in enumerate(self.layers)},
            _topk_group_of_layer={layer: source[site] for site, layer in enumerate(self.layers)},
        )
        vars(self.backend).update(changes)

    def prefill(self, q: Tensor, *given: Any, cached_topk_idx: Any, return_topk_idx: bool, **more: Any) -> Any:
        own = torch.full((1, len(q), 2), int(q.flatten()[0]), dtype=torch.int32)
        chosen = own if cached_topk_idx is None else cached_topk_idx
        self.choosers.append(int(chosen.flatten()[0]))
        return (None, q, chosen) if return_topk_idx else (None, q)

    def decode(self, q: Tensor, *given: Any, cached_topk_idx: Any, topk_out: Any, **more: Any) -> Any:
        own = torch.full((1, len(q), 2), int(q.flatten()[0]), dtype=torch.int32)
        chosen = own if cached_topk_idx is None else cached_topk_idx
        if topk_out is not None:
            topk_out.copy_(chosen)
        self.choosers.append(int(chosen.flatten()[0]))
        return None, q

    def attend(self, decoding: bool, layers: Iterable[int] | None = None) -> list[int]:
        """Run layers over two tokens; return for each the layer whose choice it attended to."""
        self.choosers.clear()
        lengths = torch.tensor([4, 4]) if decoding else torch.tensor([2])
        batch = SimpleNamespace(
            forward_mode=self.modes.DECODE if decoding else self.modes.EXTEND,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            extend_seq_lens_cpu=None if decoding else [2],
            req_pool_indices=torch.zeros(len(lengths), dtype=torch.int64),
            out_cache_loc=None,
            minimax_m3_precached_sparse_layers=None,
        )
        self.backend.init_forward_metadata_out_graph(batch)
        self.backend._prefill_seqblock_meta = (batch, *[None] * 6)
        call = self.backend.forward_decode if decoding else self.backend.forward_extend
        for layer in self.layers if layers is None else layers:
            scales = dict.fromkeys([f"{name}_scale_float" for name in ("q", "k", "v", "idx_q", "idx_k", "idx_v")])
            q = torch.full((2, 4), float(layer))
            call(q, q, q, SimpleNamespace(layer_id=layer, **scales), batch, idx_q=q, idx_k=q, idx_v=None)
        return list(self.choosers)


@pytest.mark.sglang
@pytest.mark.parametrize("decoding", [False, True], ids=["prompts", "decoding"])
def test_sglangs_backend_follows_letters_that_no_frequency_gives(
    decoding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_version()
    served = Served("FSFFSS", monkeypatch)
    assert served.attend(decoding) == [3, 3, 5, 6, 6, 6]
    assert served.attend(decoding) == [3, 3, 5, 6, 6, 6]  # nothing is left of the pass before
    assert Served("FFFFFF", monkeypatch).attend(decoding) == [3, 4, 5, 6, 7, 8]
    assert Served("FSFFSS", monkeypatch, index_cache_enabled=False).attend(decoding) == [3, 4, 5, 6, 7, 8]


@pytest.mark.sglang
def test_what_the_page_would_have_sglang_refuse_happens_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    read_version()
    served = Served("FSFFSS", monkeypatch)
    assert served.attend(False, layers=[4, 5, 6, 7, 8]) == [4, 5, 6, 6, 6]  # its source has not run
    dense = Served("FSFFSS", monkeypatch, use_dense_sparse_decode=True)
    assert dense.attend(False) == [3, 3, 5, 6, 6, 6] and dense.attend(True) == [3, 4, 5, 6, 7, 8]
