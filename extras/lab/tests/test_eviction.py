"""NOSA's eviction heads: what they compute, how they train, and how a model has them afterwards."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from extras.dense.tests.test_pages import dense_model, logits
from indexcache_dense.hf.pages import apply_page_roles, attention_in_blocks
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from indexcache_lab.cli import app
from indexcache_lab.eviction.attention import attend_with_bias
from indexcache_lab.eviction.heads import FILE, BiasUse, EvictionHeads, attach, attach_saved
from indexcache_lab.eviction.task import EvictionTask
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.checkpoint.checkpoint import weights_digest
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.messages import OTHER_LENGTH
from tests.conftest import LAYERS, VOCAB, random_tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LENGTH = 200
PLAN = Selection(
    page_tokens=32,
    pages=4,
    recent_pages=2,
    sink_pages=0,
    score="compressed_keys",
    steps=ReusePolicy.parse("nosa:1:heads"),
)
ALL = replace(PLAN, pages=LENGTH)
EVERY = "F" * LAYERS


def heads_for(model: Any, use: Any = "always", seed: int = 3) -> EvictionHeads:
    heads = EvictionHeads.like(model.config, use, seed)
    with torch.no_grad():
        heads.scale.copy_(torch.randn(heads.scale.shape, generator=torch.Generator().manual_seed(seed)))
    return heads


def tokens() -> Tensor:
    return torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


# -- what they compute


@pytest.mark.parametrize("use", ["always", "training"])
def test_new_heads_change_nothing(use: str) -> None:
    model = dense_model()
    untouched = logits(model, input_ids=tokens())
    attach(model, EvictionHeads.like(model.config, use, 0))  # type: ignore[arg-type]
    with apply_page_roles(model, Pattern("FFDFFF", ALL)):
        assert torch.equal(logits(model, input_ids=tokens()), untouched)


def test_the_bias_is_equation_8() -> None:
    """Shares times exp(b), b = scale softplus(weight v) of all key heads' values; what is left out stays out."""
    heads, generator = EvictionHeads(2, 2, 8, "always"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        heads.scale.copy_(torch.tensor([[0.0, 0.0], [0.7, -0.4]]))
    query, key, value = (torch.randn(1, groups, 9, 8, generator=generator) for groups in (4, 2, 2))
    seen = torch.ones(9, 9).tril().bool() & (torch.arange(9) != 3)
    mask = torch.zeros(1, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor]:
        products = query @ key.repeat_interleave(2, 1).mT * 0.3 + mask
        return ((products.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2),)

    vectors = value[0].transpose(0, 1).flatten(1)  # [keys, 16]
    bias = torch.tensor([0.7, -0.4])[:, None] * torch.nn.functional.softplus(heads.weight[1] @ vectors.T)
    assert torch.allclose(heads(1, value)[0], bias)
    weights = (query @ key.repeat_interleave(2, 1).mT * 0.3).exp() * bias.repeat_interleave(2, 0).exp()[None, :, None]
    weights = weights * seen
    expected = (weights / weights.sum(-1, keepdim=True)) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(heads.attend(1, attend, query, key, value, mask, 0.3), expected.transpose(1, 2))

    found = {}
    for use in ("always", "training"):
        heads.use, query.grad = use, None  # type: ignore[assignment]
        heads.zero_grad()
        out = heads.attend(1, attend, query.requires_grad_(), key, value, mask, 0.3)
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        found[use] = out.detach(), heads.scale.grad.clone(), heads.weight.grad.clone()  # type: ignore[union-attr]
    assert torch.allclose(found["training"][0], attend(query, key, value, mask)[0], atol=1e-6)
    assert not torch.allclose(found["training"][0], found["always"][0], atol=1e-3)
    for plain, biased in zip(found["training"][1:], found["always"][1:], strict=True):
        assert torch.equal(plain, biased) and bool(plain[1].any()) and not bool(plain[0].any())
    with torch.no_grad():
        heads.use = "training"
        assert torch.equal(heads.attend(1, attend, query, key, value, mask, 0.3), attend(query, key, value, mask)[0])


@pytest.mark.parametrize("rows", [1, 4])
def test_fused_attention_is_eager_attention_with_its_gradients(rows: int) -> None:
    """One choice for all heads, or one for each; as precise for a bias that bfloat16 would round."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, groups, 24, 16, generator=generator) for groups in (4, 2, 2))
    bias = torch.randn(2, 2, 24, generator=generator) * 3 + 5
    direction = torch.randn(2, 24, 4, 16, generator=generator)
    seen = torch.rand(2, rows, 24, 24, generator=generator).lt(0.6).tril() | torch.eye(24).bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

    def eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        added = mask + bias.repeat_interleave(2, 1)[:, :, None]
        products = query @ key.repeat_interleave(2, 1).mT * 0.3 + added.clamp_min(torch.finfo(torch.float32).min)
        return (products.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)

    def fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend_with_bias(query, key, value, mask, bias, scaling=0.3)

    found = []
    for attend in (eager, fused):
        given = [item.clone().requires_grad_() for item in (query, key, value, bias)]
        out = attend(*given)
        (out * direction).sum().backward()
        found.append([out, *(item.grad for item in given)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    exact = eager(*(item.bfloat16().float() for item in (query, key, value)), bias)
    half = attend_with_bias(*(item.bfloat16() for item in (query, key, value)), mask.bfloat16(), bias, scaling=0.3)
    rounded = eager(*(item.bfloat16().float() for item in (query, key, value)), bias.bfloat16().float())
    assert (half.float() - exact).abs().mean() < (rounded - exact).abs().mean()


@pytest.mark.parametrize("use", ["always", "training"])
@pytest.mark.parametrize("detach", [False, True])
def test_values_get_a_gradient_through_the_bias(use: BiasUse, detach: bool) -> None:
    """That of equation 8, also written for a value's two places: what is added up, and what the bias is made of."""
    generator = torch.Generator().manual_seed(3)
    heads = EvictionHeads(1, 2, 4, use, detach=detach)
    with torch.no_grad():
        heads.scale.copy_(torch.tensor([[0.9, -0.6]]))
    query, key, value = (torch.randn(1, groups, 7, 4, generator=generator) for groups in (4, 2, 2))
    direction = torch.randn(1, 7, 4, 4, generator=generator)
    mask = torch.zeros(1, 1, 7, 7)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor]:
        products = query @ key.repeat_interleave(2, 1).mT * 0.5 + mask
        return ((products.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2),)

    mine = value.clone().requires_grad_()
    (heads.attend(0, attend, query, key, mine, mask, 0.5) * direction).sum().backward()
    added, judged = (value.double().requires_grad_() for _ in range(2))
    vectors = judged[0].transpose(0, 1).flatten(1)
    bias = heads.scale[0].double()[:, None] * F.softplus(heads.weight[0].double() @ vectors.T)
    weights = (
        query.double() @ key.double().repeat_interleave(2, 1).mT * 0.5 + bias.repeat_interleave(2, 0)[:, None]
    ).exp()
    out = weights / weights.sum(-1, keepdim=True) @ added.repeat_interleave(2, 1)
    (out.transpose(1, 2) * direction).sum().backward()
    assert added.grad is not None and judged.grad is not None and judged.grad.abs().max() > 0.05
    expected = added.grad if detach else added.grad + judged.grad
    torch.testing.assert_close(mine.grad, expected.float(), rtol=1e-4, atol=1e-5)


def test_heads_choose_what_no_query_changes() -> None:
    """Of four pages two are open: one by the query, the other by the heads, who say the same to all queries."""
    model, seen = dense_model(), {}
    heads = heads_for(model)
    attach(model, heads)
    values: list[Tensor] = []
    hook = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out))
    with apply_page_roles(model, Pattern("FFFFFF", PLAN), observe=seen.__setitem__):
        logits(model, input_ids=tokens())
    hook.remove()
    value = values[0].view(2, LENGTH, 2, 16).transpose(1, 2)
    with torch.no_grad():
        total = heads(0, value).sum(1)[:, :192].view(2, 6, 32).mean(2)  # [batch, whole pages]
    for row in range(2):
        for position in range(160, LENGTH):
            number = position // 32 - 1  # of open pages
            open_ = seen[0][row, position, :number].nonzero()[:, 0].tolist()
            assert len(open_) == 2 and int(total[row, :number].argmax()) in open_


def test_models_without_heads_are_told(tmp_path: Path) -> None:
    model = dense_model()
    with (
        pytest.raises(SearchError, match="the plan asks for trained heads, and the model has none"),
        apply_page_roles(model, Pattern("FFFFFF", PLAN)),
    ):
        pass
    heads = heads_for(model, "training")
    attach(model, heads)
    with (
        pytest.raises(SearchError, match="trained heads are not known to attention in blocks"),
        attention_in_blocks(),
        apply_page_roles(model, Pattern("FFFFFF", PLAN)),
    ):
        pass
    heads.save(tmp_path / "heads.safetensors")
    loaded = EvictionHeads.load(tmp_path / "heads.safetensors", model.config)
    assert loaded.use == "training" and torch.equal(loaded.scale, heads.scale)
    assert torch.equal(loaded.weight, heads.weight)
    tensors = load_file(tmp_path / "heads.safetensors")
    for name, changed, message in (
        ("short", {"scale": tensors["scale"]}, "expected eviction heads"),
        ("nan", {**tensors, "scale": tensors["scale"] * torch.nan}, "a weight is not finite"),
        ("other", {**tensors, "scale": tensors["scale"][:2]}, "expected eviction heads"),
    ):
        save_file(changed, tmp_path / name, metadata={"use": "always"})
        with pytest.raises(SearchError, match=message):
            EvictionHeads.load(tmp_path / name, model.config)
    (tmp_path / "garbage").write_bytes(b"no tensors")
    with pytest.raises(SearchError, match="can't be read"):
        EvictionHeads.load(tmp_path / "garbage", model.config)


def test_steps_with_heads() -> None:
    steps = ReusePolicy.parse("nosa:8:heads")
    assert str(steps) == "nosa:8:heads" and steps != ReusePolicy.parse("nosa:8")
    assert Selection.parse(str(PLAN)) == PLAN
    for text in ("ema:0.9:heads", "nosa:8:norms", "nosa:8:", "none:heads"):
        with pytest.raises(PatternError, match="steps"):
            ReusePolicy.parse(text)


# -- how they train


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = np.random.default_rng(2).integers(3, VOCAB, (40, 96)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


PAGES = "page_tokens=32,pages=3,recent_pages=2,sink_pages=0"
OPTIONS = ["--seq-len", 160, "--num-sequences", 8, "--num-eval-sequences", 2, "--steps", 4, "--batch-size", 2,
           "--every", "checkpoint=2,evaluate=2,show=1", "--ramp-steps", 1, "--device", "cpu"]  # fmt: skip
HEADS = "query_pages=1"


def train(model: Path, data: Path, output: Path, *more: Any) -> tuple[int, str]:
    words = [
        "eviction",
        "--model",
        model,
        "--training",
        data,
        "--output",
        output,
        *OPTIONS,
        *(() if "--heads" in more else ("--heads", HEADS)),
        *(() if "--selection" in more else ("--selection", PAGES)),
        *more,
    ]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def log(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "check")} for line in lines]


@pytest.fixture(scope="module")
def trained(dense_folder: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained") / "out"
    code, text = train(dense_folder, texts, output, "--heads", f"{HEADS},lr=0.1")
    assert code == 0, text
    assert "eviction heads: KL" in text and "norms of values" in text and "more than attending to" in text
    return output


def test_heads_alone(trained: Path, dense_folder: Path) -> None:
    """The body stays, the heads have learnt, and engines take them with the plan."""
    assert (trained / "model" / "model.safetensors").read_bytes() == (dense_folder / "model.safetensors").read_bytes()
    assert weights_digest(str(trained / "model")) != weights_digest(str(dense_folder))
    rows = json.loads((trained / "metrics.json").read_text())["rows"]
    plans = ["original", "best by query", "norms of values", "eviction", "eviction"]
    assert [row["stage"] for row in rows] == plans and [row["step"] for row in rows] == [0, 0, 0, 2, 4]
    assert rows[0]["kl"] == 0 and all(row["kl"] > 0 for row in rows[1:])
    file = PatternFile.load(trained / "pattern.yaml")
    plan = file.as_pattern()
    assert plan.roles == EVERY and str(plan.selection) == "32|3|2|0|compressed_keys|nosa:1:heads|"
    tensors = load_file(trained / "model" / FILE)
    assert bool(tensors["scale"].any()) and tensors["weight"].shape == (LAYERS, 2, 32)
    engine = TransformersEngine.load(str(trained / "model"), "cpu", selection=plan.selection)
    attach_saved(engine)
    [found] = engine.evaluate([plan], random_tokens(2, 160, first_sparse_position=100), "kl")
    assert min(found.losses) > 0
    stranger = TransformersEngine.load(str(dense_folder), "cpu", selection=plan.selection)
    attach_saved(stranger)
    with pytest.raises(SearchError, match="the plan asks for trained heads"):
        list(stranger.evaluate([plan], random_tokens(2, 160, first_sparse_position=100), "nll"))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["--body", "lr=1e-3"], marks=pytest.mark.slow),
        ["--selection", f"{PAGES},heads=key"],
        pytest.param(["--heads", f"{HEADS},detach=yes", "--body", "lr=1e-3"], marks=pytest.mark.slow),
        ["--engine", "gradient_checkpointing=no", "--heads", f"{HEADS},bias=training", "--body", "lr=1e-3"],
    ],
)
def test_a_killed_run_goes_on_exactly(
    more: list[str], dense_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(dense_folder, texts, whole, *more)[0] == 0
    real = EvictionTask.step

    def step(task: EvictionTask, number: int) -> dict[str, Any]:
        if number == 3:
            raise KeyboardInterrupt
        return real(task, number)

    with monkeypatch.context() as patch:
        patch.setattr(EvictionTask, "step", step)
        assert train(dense_folder, texts, killed, *more)[0] == 130
    assert not (killed / "model").exists()
    code, text = train(dense_folder, texts, killed, *more)
    assert code == 0, text
    assert log(killed) == log(whole)
    for name in ("model.safetensors", str(FILE)):
        mine, theirs = (load_file(output / "model" / name) for output in (killed, whole))
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    before = load_file(dense_folder / "model.safetensors")
    after = load_file(whole / "model" / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before) == ("--body" not in more)
    metrics = json.loads((killed / "metrics.json").read_text())
    code, text = train(dense_folder, texts, killed, *more)
    assert code == 0 and json.loads((killed / "metrics.json").read_text())["rows"] == metrics["rows"]


def test_variants_are_other_runs(dense_folder: Path, texts: Path, tmp_path: Path, trained: Path) -> None:
    """Key heads that choose for themselves, and values without a gradient; both are said where they are looked for."""
    found = {}
    for name, more in (
        ("key", ["--heads", f"{HEADS},lr=0.1", "--selection", f"{PAGES},heads=key"]),
        ("detach", ["--heads", f"{HEADS},lr=0.1,detach=yes"]),
    ):
        code, text = train(dense_folder, texts, tmp_path / name, *more)
        assert code == 0, text
        found[name] = load_file(tmp_path / name / "model" / FILE)
        assert json.loads((tmp_path / name / "metrics.json").read_text())["settings"]["detach"] == (name == "detach")
    mine = load_file(trained / "model" / FILE)
    for other in found.values():
        assert not torch.equal(other["weight"], mine["weight"])
    plan = PatternFile.load(tmp_path / "key" / "pattern.yaml").as_pattern()
    assert str(plan.selection) == "32|3|2|0|compressed_keys|nosa:1:heads||key"
    code, text = train(dense_folder, texts, tmp_path / "key")
    assert code == 2 and "belongs to a run with" in " ".join(text.split())


def test_gradient_checkpointing_changes_nothing(dense_folder: Path, texts: Path, tmp_path: Path, trained: Path) -> None:
    assert (
        train(dense_folder, texts, tmp_path, "--heads", f"{HEADS},lr=0.1", "--engine", "gradient_checkpointing=no")[0]
        == 0
    )
    mine, theirs = (load_file(output / "model" / FILE) for output in (tmp_path, trained))
    for key in theirs:
        torch.testing.assert_close(mine[key], theirs[key], rtol=1e-4, atol=1e-5)


def test_losses_that_are_no_numbers_end_it(
    dense_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EvictionTask._losses

    def losses(task: EvictionTask, *args: Any) -> Tensor:
        found = real(task, *args)
        return found * torch.nan if task.optimizer.state else found  # from the second step on

    monkeypatch.setattr(EvictionTask, "_losses", losses)
    code, text = train(dense_folder, texts, tmp_path)
    assert code == 1 and "step 2: loss nan" in text and "there is no checkpoint yet" in text
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pattern", "FSFSFS"], "--pattern is FSFSFS, expected D and F"),
        (["--pattern", "DDDDDD"], "--pattern is DDDDDD, expected D and F"),
        (["--pattern", "FFF"], OTHER_LENGTH.format(3, 6)),
        (["--steps", 0], "--steps is 0, expected at least one step"),
        (["--loss", "own"], "No such option: --loss"),
        (["--warmup-steps", 3], "No such option: --warmup-steps"),
        (["--lr", 0.2], "No such option: --lr; expected --heads lr=VALUE"),
        (["--selection", f"{PAGES},heads=all"], "heads: found 'all', expected one of joint, key"),
        (["--detach"], "No such option: --detach; expected --heads detach=VALUE"),
        (
            ["--selection", "page_tokens=16,pages=3,recent_pages=2,sink_pages=0"],
            "nosa with page_tokens 16 and recent_pages 2, expected at least 32 and 2",
        ),
        (["--heads", "query_pages=2"], "query_pages is 2, expected at most 1"),
        (["--seq-len", 97], "--seq-len is 97, but queries see every token up to position 96"),
        (["--batch-size", 3, "--engine", "micro_batch=2"], "--batch-size is 3, expected a multiple of micro_batch"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    more: list[Any], message: str, dense_folder: Path, texts: Path, tmp_path: Path
) -> None:
    code, text = train(dense_folder, texts, tmp_path, *more)
    assert code == 2 and message in " ".join(text.split()), text


def test_what_is_trained_lies_apart_and_stays_the_same(dense_folder: Path, texts: Path, tmp_path: Path) -> None:
    """An output in the model's folder would be copied into itself; other data under the same name are another run."""
    model = shutil.copytree(dense_folder, tmp_path / "model")
    (model / "loop").symlink_to(tmp_path)
    before = sorted(path.relative_to(model) for path in model.rglob("*"))
    for output in (model / "out", model, tmp_path, model / "loop"):
        code, text = train(model, texts, output)
        assert code == 2 and "what is read and what is written overlap" in " ".join(text.split()), text
    assert sorted(path.relative_to(model) for path in model.rglob("*")) == before
    data = shutil.copy(texts, tmp_path / "texts.jsonl")
    assert train(model, data, tmp_path / "out")[0] == 0
    found = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert FILE.parent.name in found and "loop" not in found
    data.write_text(data.read_text().replace("[", "[5, ", 1))
    code, text = train(model, data, tmp_path / "out")
    assert code == 2 and f"belongs to a run with sha256 of {data}" in " ".join(text.split())


def test_models_with_indexers_are_refused(model_folder: Path, texts: Path, tmp_path: Path) -> None:
    code, text = train(model_folder, texts, tmp_path / "out")
    assert code == 2 and "has indexers that choose, expected a dense model" in " ".join(text.split())
