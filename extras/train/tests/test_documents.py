"""Documents apart, `indexcache-distill --rows documents=apart`: packing, losses and gradients, and whole runs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from extras.train.tests.distilling import arguments, distill, in_two_processes, records, train_alike
from indexcache_kernels.transformers import INDEXER_ROPES
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from indexcache_train.distill.model import Distillation, set_trainable
from indexcache_train.distill.settings import DistillSettings, Stage
from indexcache_train.training.stored import load_set, save_set
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe
from tests.conftest import LAYERS, TOPK, VOCAB, tiny_config, tiny_model
from tests.forked import forked, killed_at

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("no_pictures")]
MODEL, PATTERN = describe(tiny_config(), "tiny"), Pattern("FSSFSS")
STAGES: tuple[Stage, ...] = ("warmup", "sparse")
LENGTHS = (13, 1, 18)  # of the documents of a sequence
APART = {"rows": "documents=apart"}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 59 tokens, which end anywhere in sequences of 32."""
    path = tmp_path_factory.mktemp("documents") / "training.jsonl"
    generator = np.random.default_rng(3)
    rows = [generator.integers(3, VOCAB, length).tolist() for length in generator.integers(1, 60, 70)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(model_folder: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("apart") / "out"
    code, text = distill(model_folder, documents, output, **APART)
    assert code == 0, text
    return output


def packed(path: Path, rows: list[list[int]], count: int, purpose: Any, seq_len: int = 24) -> TokenSet:
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    reader = TokenReader(lambda: pytest.fail("token ids need no tokenizer"), 4096, seq_len)
    packer = Packer(reader, MODEL, seq_len, apart=True)
    if purpose == "evaluation":
        return packer.held_out([str(path)], count)
    return packer.collect([str(path)], count, 0, purpose)


@pytest.mark.parametrize(("purpose", "first"), [("training", 1), ("evaluation", TOPK + 1)])
def test_a_token_sees_its_own_document(tmp_path: Path, purpose: str, first: int) -> None:
    """Token ids say which document they are of, and where they stand in it."""
    rows = [[64 * number + place for place in range(length)] for number, length in enumerate((5, 40, 17, 3, 1, 60, 30))]
    data = packed(tmp_path / "rows.jsonl", rows, 5, purpose)
    assert data.starts is not None and data.starts.dtype == np.int32
    for tokens, starts, scored in zip(data.tokens, data.starts, data.scored, strict=True):
        place = np.arange(24)
        own = starts[place] <= place
        assert own.all() and (starts[starts] == starts).all()
        for position in place:
            seen = tokens[starts[position] : position + 1]
            assert (seen // 64 == tokens[position] // 64).all()  # nothing of another document
            assert (np.diff(seen) == 1).all()
            before = tokens[starts[position] - 1] if starts[position] else None
            assert before is None or before // 64 != tokens[position] // 64  # and all of its own in the sequence
        assert (scored == (place - starts >= first)).all() and scored.any()


def test_short_documents_have_nothing_to_measure(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(3, 4096, (60, TOPK)).tolist()
    assert packed(tmp_path / "rows.jsonl", rows, 2, "training").scored.any()
    with pytest.raises(
        DataError, match=rf"gives 0 evaluation .* longer documents: the first {TOPK + 1} tokens of each"
    ):
        packed(tmp_path / "rows.jsonl", rows, 2, "evaluation")


def test_sets_with_documents_are_kept(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(3, 4096, (9, 31)).tolist()
    data = packed(tmp_path / "rows.jsonl", rows, 4, "training")
    assert data.starts is not None
    save_set(data, tmp_path / "set")
    kept = load_set(tmp_path / "set")
    assert kept is not None and kept.starts is not None and (kept.starts == data.starts).all()
    taken = data.taken([3, 1])
    assert taken.starts is not None and (taken.starts == data.starts[[3, 1]]).all()
    joined = TokenSet(data.tokens, data.scored, data.source_of, data.sources)
    assert joined.sha256 != data.sha256 == kept.sha256


def sequences() -> tuple[Tensor, Tensor]:
    """Two sequences of documents in another order each, and where the documents begin."""
    tokens = torch.randint(3, VOCAB, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    rows = []
    for lengths in (LENGTHS, LENGTHS[::-1]):
        begins = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        rows.append(begins.repeat_interleave(torch.tensor(lengths)))
    return tokens, torch.stack(rows)


def learned(model: Any, stage: Stage, batches: list[tuple[Tensor, Tensor | None]], kernels: Any = None) -> Any:
    """Losses of tokens within documents, divergences, and gradients of both."""
    distillation = Distillation(model, PATTERN, stage, "multi", kernels)
    model.zero_grad()
    losses, divergences = [], torch.zeros(len(PATTERN.full_layers), dtype=torch.float64)
    with distillation.attached():
        for tokens, starts in batches:
            output = distillation(tokens, starts)
            begins = torch.zeros_like(tokens) if starts is None else starts
            within = (torch.arange(tokens.shape[1]) != begins)[:, 1:]
            total = output.divergences.sum()
            if output.token_losses is not None:
                losses.append(output.token_losses[within])
                total = total + losses[-1].sum()
            total.backward()
            divergences += output.divergences.detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return (torch.cat(losses).detach() if losses else None), divergences, gradients


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model_type", INDEXER_ROPES)
def test_documents_of_a_sequence_are_as_alone(stage: Stage, model_type: str) -> None:
    """In float64, without experts, whose choice would differ by rounding."""
    model = tiny_model(tiny_config(model_type, first_k_dense_replace=LAYERS)).double().train()
    set_trainable(model, PATTERN, stage)
    tokens, starts = sequences()
    alone: list[tuple[Tensor, Tensor | None]] = []
    for row, lengths in zip(tokens, (LENGTHS, LENGTHS[::-1]), strict=True):
        alone += [(document[None], None) for document in row.split(lengths)]
    expected, found = learned(model, stage, alone), learned(model, stage, [(tokens, starts)])
    exact: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-6)  # losses of tokens are float32
    torch.testing.assert_close(found[1], expected[1], **exact)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in found[2].items():
        bounds = exact if ".indexer." in name else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(gradient, expected[2][name], **bounds)
    joined = learned(model, stage, [(tokens, None)])
    assert (joined[1] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_the_kernels_keep_documents_apart(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("indexcache_kernels.transformers", "indexcache_train.distill.kernel_attention"):
        monkeypatch.setattr(f"{module}.ROWS", 20)  # blocks that end within sequences
    model = tiny_model(tiny_config())
    set_trainable(model, PATTERN, stage)
    expected, found = (learned(model, stage, [sequences()], kernels) for kernels in (None, "naive"))
    torch.testing.assert_close(found[:2], expected[:2], rtol=2e-5, atol=2e-5)
    for name, gradient in found[2].items():
        most = expected[2][name].abs().max().item()
        torch.testing.assert_close(gradient, expected[2][name], rtol=1e-3, atol=1e-3 * most)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("stage", STAGES)
def test_the_kernels_keep_documents_apart_on_a_gpu(stage: Stage) -> None:
    model = tiny_model({**tiny_config(), "v_head_dim": 16}).cuda()  # of flex attention the least
    set_trainable(model, PATTERN, stage)
    tokens = torch.randint(3, VOCAB, (2, 200), generator=torch.Generator().manual_seed(0)).cuda()
    starts = torch.tensor([0, 60, 61, 150]).repeat_interleave(torch.tensor([60, 1, 89, 50])).expand(2, -1).cuda()
    gradients = []
    for kernels in (None, "auto"):
        distillation = Distillation(model, PATTERN, stage, "multi", kernels)  # type: ignore[arg-type]
        model.zero_grad()
        with distillation.attached():
            output = distillation(tokens, starts)
            losses = () if output.token_losses is None else (output.token_losses.sum(),)
            (output.divergences.sum() + sum(losses)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    errors = [float((gradients[1][name] - g).norm() / g.norm()) for name, g in gradients[0].items()]
    assert sum(errors) / len(errors) < 5e-3


def test_a_run(trained: Path, model_folder: Path, documents: Path, tmp_path: Path) -> None:
    rows = load_set(trained / "work" / "data" / "training")
    assert rows is not None and rows.starts is not None and rows.starts.any()
    identity = json.loads((trained / "work" / "run.json").read_text())
    assert identity["apart"] is True
    code, text = distill(model_folder, documents, trained)
    assert code == 2 and "belongs to a run with apart True, now it is False" in " ".join(text.split())
    code, text = distill(model_folder, documents, tmp_path / "joined")
    assert code == 0, text
    ours, theirs = (records(output)[-1]["losses"] for output in (trained, tmp_path / "joined"))
    assert ours != theirs


def test_the_data_are_shown(model_folder: Path, documents: Path, tmp_path: Path) -> None:
    code, text = distill(model_folder, documents, tmp_path / "out", **APART, dry_run=True)
    assert code == 0 and " documents apart, " in text and not (tmp_path / "out").exists()


def test_a_search_knows_joined_documents_alone(model_folder: Path, documents: Path, tmp_path: Path) -> None:
    code, text = distill(model_folder, documents, tmp_path / "out", **APART, search_first="1/3")
    line = " ".join(text.split())
    assert code == 2 and "--rows documents=apart with --search-first" in line and not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_ends_the_run(
    model_folder: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DistillSettings, "rate", lambda *_: 1e18)
    changes = {"warmup_steps": 0, "steps": 20, "lr": 1, "checkpoint_every": 1, "max_norm": 1e6}
    code, text = distill(model_folder, documents, tmp_path / "out", **changes, **APART)
    assert code == 1 and "expected finite numbers; the last good checkpoint is" in " ".join(text.split())
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow  # of the same loop as test_distill.py's
def test_two_processes_train_as_one_does(trained: Path, model_folder: Path, documents: Path, tmp_path: Path) -> None:
    words = arguments(model_folder, documents, tmp_path / "out", **APART)
    in_two_processes(words, tmp_path / "log")
    train_alike(trained, tmp_path / "out", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [4, 7])
def test_a_killed_run_goes_on_to_the_same_losses(
    trained: Path, model_folder: Path, documents: Path, tmp_path: Path, lines: int
) -> None:
    process = forked("indexcache_train", arguments(model_folder, documents, tmp_path / "out", **APART))
    killed_at(process, tmp_path / "out" / "log.jsonl", lines)
    assert process.exitcode == -signal.SIGKILL
    code, text = distill(model_folder, documents, tmp_path / "out", **APART)
    assert code == 0, text
    assert records(tmp_path / "out") == records(trained)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "out", trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
