"""Released checkpoints: what NOSA's and InfLLM-V2's equations say of small random ones, computed apart in float64."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.selection import Selection
from indexcache_lab.cli import app
from indexcache_lab.eviction.heads import FILE, attach_saved
from indexcache_lab.offload.decoder import OffloadedDecoder
from indexcache_lab.released.convert import convert
from indexcache_lab.released.formats import Released
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.io.errors import IndexCacheError
from tests.core.test_pattern_file import mutate

LAYERS, HIDDEN, HEADS, GROUPS, DIM, VOCAB, LENGTH = 2, 32, 4, 2, 16, 61, 250
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 128, "attention_factor": 1.1,
            "short_factor": [1 + at / 8 for at in range(DIM // 2)],
            "long_factor": [1 + at / 8 for at in range(DIM // 2)]}  # fmt: skip
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
         "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM, "hidden_act": "silu",
         "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": LONGROPE,
         "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "float32"}  # fmt: skip
NOSA = {**SIZES, "architectures": ["SparseLlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
        "auto_map": {"AutoModelForCausalLM": "modeling_llama_nosa.SparseLlamaForCausalLM"}}  # fmt: skip
SPARSE = {"kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64, "window_size": 128, "topk": 2,
          "use_nope": False, "dense_len": 8192}  # fmt: skip
MINICPM = {**SIZES, "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12,
           "scale_depth": 1.4, "dim_model_base": 8, "sparse_config": SPARSE,
           "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}}  # fmt: skip


def weights(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Random tensors by the names of the checkpoint."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, spread: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    found = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "model.norm.weight": 1 + normal(HIDDEN, spread=0.1)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = normal(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        for name, out, into in (("q", HEADS * DIM, HIDDEN), ("k", GROUPS * DIM, HIDDEN), ("v", GROUPS * DIM, HIDDEN)):
            found[f"{block}self_attn.{name}_proj.weight"] = normal(out, into)
        found[f"{block}self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * DIM)
        for name, out, into in (("gate", 48, HIDDEN), ("up", 48, HIDDEN), ("down", HIDDEN, 48)):
            found[f"{block}mlp.{name}_proj.weight"] = normal(out, into)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{block}{name}.weight"] = 1 + normal(HIDDEN, spread=0.1)
        if config["model_type"] == "llama":
            found[f"{block}self_attn.A"] = normal(GROUPS, spread=1.0)
            found[f"{block}self_attn.delta.weight"] = normal(GROUPS, GROUPS * DIM)
    return found


def checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A checkpoint as it is released, in two files with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_llama_nosa.py").write_text("raise RuntimeError('never run')\n")
    tensors = weights(config) if tensors is None else tensors
    names, place = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(4, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed))


# -- the judge: one query, key head and page after the other, in float64


def rotated(x: Tensor) -> Tensor:
    """`[tokens, heads, D]` with positions in them: pairs of dimensions as complex numbers, turned and stretched."""
    speed = torch.tensor([10000.0 ** (-2 * at / DIM) / LONGROPE["long_factor"][at] for at in range(DIM // 2)])  # type: ignore[index]
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * speed.double()
    turn = torch.polar(torch.full_like(angle, 1.1), angle)[:, None]
    turned = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def chosen_pages(query: Tensor, keys: Tensor, important: list[float], plan: Selection) -> set[int]:
    """The pages of one query, `[H / G, D]`, over `[tokens, D]` of its key head, by equation 7."""
    size, newest = plan.page_tokens, (len(keys) - 1) // plan.page_tokens
    if newest + 1 <= plan.pages:
        return set(range(newest + 1))
    means = torch.stack([keys[at : at + 32].mean(0) for at in range(0, len(keys) - 31, 16)])  # equation 5
    shares = (query @ means.T / math.sqrt(DIM)).softmax(-1).sum(0).tolist()

    def score(page: int) -> float:  # equation 6, with the means that reach into a page from outside
        return max(
            share for at, share in enumerate(shares) if 16 * at < (page + 1) * size and 16 * at + 32 > page * size
        )

    fixed = {page for page in range(newest + 1) if page < plan.sink_pages or page > newest - plan.recent_pages}
    ranked = sorted(set(range(newest + 1)) - fixed, key=score, reverse=True)
    wanted = plan.pages - len(fixed)
    if plan.steps.query_pages is None:
        return fixed | set(ranked[:wanted])
    asked = set(ranked[: plan.steps.query_pages])
    others = sorted(set(ranked) - asked, key=lambda page: important[page], reverse=True)
    return fixed | asked | set(others[: wanted - len(asked)])


def judged(config: Mapping[str, Any], tensors: Mapping[str, Tensor], ids: Tensor, plan: Selection) -> Tensor:
    """Logits of all tokens, `[tokens, vocabulary]`; each one selects."""
    w = {name: item.double() for name, item in tensors.items()}
    scale = config.get("scale_depth", math.sqrt(LAYERS)) / math.sqrt(LAYERS)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    hidden = w["model.embed_tokens.weight"][ids] * config.get("scale_emb", 1)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        x = norm(hidden, f"{block}input_layernorm")
        q, k, v = (x @ w[f"{block}self_attn.{name}_proj.weight"].T for name in "qkv")
        bias = torch.zeros(len(ids), GROUPS, dtype=torch.float64)
        if plan.steps.importance:  # equation 4
            bias = (1 + (v @ w[f"{block}self_attn.delta.weight"].T).exp()).log() * w[f"{block}self_attn.A"]
        q, k = rotated(q.view(len(ids), HEADS, DIM)), rotated(k.view(len(ids), GROUPS, DIM))
        v = v.view(len(ids), GROUPS, DIM)
        out = torch.zeros(len(ids), HEADS, DIM, dtype=torch.float64)
        for head in range(GROUPS):
            own, size = slice(head * HEADS // GROUPS, (head + 1) * HEADS // GROUPS), plan.page_tokens
            important = [
                max(
                    float(bias[page * size + at : page * size + at + 32, head].mean()) for at in range(0, size - 31, 16)
                )
                for page in range(len(ids) // size)
            ]
            for at in range(len(ids)):
                pages = chosen_pages(q[at, own], k[: at + 1, head], important, plan)
                seen = [token for token in range(at + 1) if token // size in pages]
                weight = bias[seen, head].exp() * (q[at, own] @ k[seen, head].T / math.sqrt(DIM)).exp()  # equation 8
                out[at, own] = weight / weight.sum(-1, keepdim=True) @ v[seen, head]
        hidden = hidden + scale * (out.flatten(1) @ w[f"{block}self_attn.o_proj.weight"].T)
        x = norm(hidden, f"{block}post_attention_layernorm")
        gate, up = (x @ w[f"{block}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + scale * ((F.silu(gate) * up) @ w[f"{block}mlp.down_proj.weight"].T)
    head_weight = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(hidden, "model.norm") / (HIDDEN / config.get("dim_model_base", HIDDEN)) @ head_weight.T


SMALL = {"page_tokens": 32, "pages": 4, "recent_pages": 2, "sink_pages": 0}


def loaded(folder: Path, **sizes: int) -> tuple[Any, Pattern]:
    """The converted model with its heads, and its plan with smaller pages."""
    plan = PatternFile.load(folder / "pattern.yaml").as_pattern()
    assert plan.selection is not None
    steps = plan.selection.steps
    if steps.query_pages is not None:
        steps = replace(steps, query_pages=1)
    selection = replace(plan.selection, steps=steps, **sizes)  # type: ignore[arg-type]
    engine = TransformersEngine.load(str(folder / "model"), "cpu", selection=selection)
    attach_saved(engine)
    return engine.torch_model.eval(), replace(plan, selection=selection)


def test_a_nosa_checkpoint_is_what_its_equations_say(tmp_path: Path) -> None:
    """In the reference engine, and decoded behind a sparse prompt with the cache in host memory."""
    tensors = weights(NOSA)
    written = convert(str(checkpoint(tmp_path / "released", NOSA, tensors)), tmp_path / "out")
    assert written == [tmp_path / "out" / "model", tmp_path / "out" / "pattern.yaml"]
    plan = PatternFile.load(written[1]).as_pattern()
    assert (plan.roles, str(plan.selection)) == ("FF", "64|64|16|1|compressed_keys|nosa:16:heads||key")
    assert not list(written[0].glob("*.py"))
    model, pattern = loaded(tmp_path / "out", **SMALL)
    assert pattern.selection is not None
    truth = judged(NOSA, tensors, tokens(), pattern.selection).float()
    with torch.inference_mode(), apply_page_roles(model, pattern):
        found = model(tokens()[None]).logits[0]
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        assert (model(tokens()[None]).logits[0] - truth)[128:].abs().max() > 0.1  # pages and biases matter
    offloaded = replace(pattern, selection=replace(pattern.selection, buffer_pages=4))
    decoder = OffloadedDecoder(model, offloaded, 1, LENGTH, prefill="sparse")
    rows = [decoder.read(0, tokens()[:170])]
    rows += [decoder.step(token[None])[0] for token in tokens()[170:-1]]
    torch.testing.assert_close(torch.stack(rows), truth[169:-1], rtol=1e-3, atol=1e-3)
    assert sum(decoder.misses.values()) > 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_minicpm_checkpoint_is_a_llama_with_its_scales_in_the_weights(tmp_path: Path, tied: bool) -> None:
    config = {**MINICPM, "tie_word_embeddings": tied}
    tensors = weights(config)
    convert(str(checkpoint(tmp_path / "released", config, tensors)), tmp_path / "out")
    plan = PatternFile.load(tmp_path / "out" / "pattern.yaml").as_pattern()
    assert str(plan.selection) == "64|4|2|1|compressed_keys|none||key"
    assert not (tmp_path / "out" / "model" / FILE).exists()
    model, pattern = loaded(tmp_path / "out", **SMALL)
    assert pattern.selection is not None
    truth = judged(config, tensors, tokens(), pattern.selection).float()
    with torch.inference_mode(), apply_page_roles(model, pattern):
        found = model(tokens()[None]).logits[0]
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-3)


def test_it_is_converted_on_the_command_line_and_again(tmp_path: Path) -> None:
    """Into the same folder; a file of somebody else there stays, and what is read is not written to."""
    folder, output = checkpoint(tmp_path / "released", NOSA), tmp_path / "out"

    def run(target: Path) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["released", "--model", str(folder), "--output", str(target)])
        return done.exit_code, " ".join(done.output.split())

    for _ in range(2):
        code, text = run(output)
        assert code == 0 and f"Next: indexcache-offload --model {output}/model --pattern" in text, text
    heads = load_file(output / "model" / FILE)
    assert heads["scale"].shape == (LAYERS, GROUPS) and heads["weight"].shape == (LAYERS, GROUPS, GROUPS * DIM)
    (output / "model" / "notes.txt").write_text("mine")
    code, text = run(output)
    assert code == 2 and "notes.txt: is not written by" in text
    code, text = run(folder / "inside")
    assert code == 2 and "what is read and what is written overlap" in text


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**NOSA, "architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\], expected"),
        ({**NOSA, "model_type": "mistral"}, "model_type is 'mistral', expected llama"),
        ({**NOSA, "attention_bias": True}, "attention_bias is True, expected false"),
        ({**NOSA, "pretraining_tp": 2}, "pretraining_tp is 2, expected 1"),
        ({**NOSA, "quantization_config": {}}, "quantization_config is {}, expected none"),
        (without(MINICPM, "sparse_config"), "sparse_config is None, expected the sizes of InfLLM-V2"),
        ({**MINICPM, "sparse_config": {**SPARSE, "kernel_size": 16}}, "sparse_config.kernel_size is 16, expected 32"),
        ({**MINICPM, "sparse_config": {**SPARSE, "use_nope": True}}, "sparse_config.use_nope is True, expected false"),
        ({**MINICPM, "sparse_config": {**SPARSE, "topk": 1}}, "sparse_config: pages is 3, expected more than"),
        ({**MINICPM, "sparse_config": {**SPARSE, "window_size": 100}}, "sparse_config.window_size is 100"),
        ({**MINICPM, "sparse_config": {**SPARSE, "block_size": 48}}, "sparse_config.window_size is 128"),
        ({**MINICPM, "scale_emb": 0}, "scale_emb is 0, expected a positive number"),
        ({**MINICPM, "scale_depth": math.nan}, "scale_depth is nan, expected a positive number"),
        ({**MINICPM, "dim_model_base": 33}, "dim_model_base is 33, expected 1 to 32"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=f"here: config.json: {message}"):
        Released.read(config, "here")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.self_attn.A", None, "model.layers.1.self_attn.A is not there, expected"),
        ("model.layers.1.self_attn.A", torch.zeros(3), r"model.layers.1.self_attn.A is \[3\], expected \[2\]"),
        ("model.layers.2.self_attn.A", torch.zeros(2), r"model.layers.2.self_attn.A is \[2\], expected no such layer"),
        ("model.layers.0.self_attn.A", torch.full((2,), torch.nan), "A is not finite, expected numbers alone"),
        ("model.layers.0.self_attn.delta.weight", torch.zeros(2, 16), r"delta.weight is \[2, 16\], expected \[2, 32\]"),
    ],
)
def test_heads_that_are_refused(name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    """Nothing is written then."""
    tensors = without(weights(NOSA), name) if tensor is None else {**weights(NOSA), name: tensor}
    with pytest.raises(SearchError, match=message):
        convert(str(checkpoint(tmp_path / "released", NOSA, tensors)), tmp_path / "out")
    assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / "pattern.yaml").exists()


def test_weights_that_no_plain_llama_has_are_refused(tmp_path: Path) -> None:
    """Of an architecture with heads of another name, and of MiniCPM with NOSA's: when loaded, and at once."""
    strange = {**weights(NOSA), "model.layers.0.self_attn.gate.weight": torch.zeros(2, 2)}
    convert(str(checkpoint(tmp_path / "strange", NOSA, strange)), tmp_path / "out")
    with pytest.raises(SearchError, match=r"gate\.weight is in the checkpoint, and config.json has no place for it"):
        loaded(tmp_path / "out")
    both = {**weights(MINICPM), "model.layers.0.self_attn.A": torch.zeros(2)}
    with pytest.raises(SearchError, match=r"has model\.layers\.0\.self_attn\.A, expected no eviction heads"):
        convert(str(checkpoint(tmp_path / "both", MINICPM, both)), tmp_path / "other")


ODD = (None, True, False, -1, 0, 1, 3, 2**70, 1.5, math.nan, math.inf, "", "64", "\n", [], {}, [1], {"a": 1})


def test_a_thousand_damaged_configurations_are_one_line_or_a_selection() -> None:
    draw, accepted = random.Random(2026), 0
    for number in range(1000):
        config = json.loads(json.dumps((NOSA, MINICPM)[number % 2]))
        for _ in range(draw.randint(1, 3)):
            place = draw.choice([config, config.get("sparse_config", config)])
            place = place if isinstance(place, dict) and place else config
            key = draw.choice(sorted(place))
            if draw.random() < 0.2:
                del place[key]
            else:
                place[key] = draw.choice(ODD)
        try:
            found = Released.read(config, "here")
        except SearchError as error:
            assert str(error).startswith("here: config.json: ") and "\n" not in str(error)
            continue
        accepted += 1
        assert isinstance(found.selection, Selection) and found.embedding > 0 < found.residual and found.logits > 0
    assert 100 < accepted < 900


def test_a_thousand_damaged_selections_are_one_line_or_a_plan(tmp_path: Path) -> None:
    convert(str(checkpoint(tmp_path / "released", NOSA)), tmp_path / "out")
    whole = (tmp_path / "out" / "pattern.yaml").read_text()
    [line] = [line for line in whole.splitlines() if line.startswith("selection: ")]
    assert "heads: key" in line and "importance: heads" in line
    draw, accepted = random.Random(2027), 0
    for _ in range(1000):
        data = whole.encode().replace(line.encode(), mutate(line, draw))
        try:
            file = PatternFile.loads(data, "plan.yaml")
        except IndexCacheError as error:
            assert str(error).startswith("plan.yaml: ") and "\n" not in str(error)
            continue
        accepted += 1
        assert PatternFile.loads(file.dumps()) == file
        assert Selection.parse(str(file.as_pattern().selection)) == file.as_pattern().selection
    assert 5 < accepted < 500
