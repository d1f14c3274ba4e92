"""Layers that select for blocks of queries: how patterns say so, what is selected, and who refuses it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from indexcache_kernels.transformers import use_kernels
from indexcache_lab.offload.cli import app as offload_app
from indexcache_search.cli.evaluate import app
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import DataError, SearchError
from indexcache_search.hf.indexers import block_selection
from indexcache_search.hf.roles import apply_roles
from indexcache_train.cli import app as distill_app
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.dsa.override import indexer_types, to_sglang, to_vllm
from sglang_indexcache.io.errors import PatternError, PatternFileError
from sglang_indexcache.pattern.indexer_setting import NO_CANDIDATES, QUERIES
from sglang_indexcache.pattern_file.file import ModelSection
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from tests.conftest import LAYERS, TOPK, VOCAB, random_tokens, tiny_config, tiny_engine, tiny_model, tiny_v4_config

SEQ_LEN, REPLY = 56, 13
PROMPT = torch.arange(SEQ_LEN)[None] < SEQ_LEN - REPLY


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FS+0q3", "3 queries, expected one of 2, 4, 8, 16, 64"),
        ("FS+0q1", "1 queries"),
        ("FS+0q128", "indexer is '0q128'"),
        ("FS+1q2", "1q2 is of F layers, but layer 1 is S"),
        ("FS+2q2", "2q2 is of layer 2, expected 0 to 1"),
        ("FSF+2q2+0q2", "indexers are of layers 2, 0, expected each once, ascending"),
        ("FS+0q2+0q2", "expected each once"),
        ("FS+", "indexer is ''"),
        ("FS+00q2", "indexer is '00q2'"),
        ("FS +0q2", "' ' for layer 2"),
        ("FS+0q2|16|64|8|0|token_max", "indexer is '0q2"),
    ],
)
def test_what_no_pattern_says_is_refused(text: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern.parse(text)


@pytest.mark.parametrize("text", ["FSCF", "FSCF+2c4", "FSFF+2c4", "FCFC+1c2+3c4", "FSCF+0q4+2c4", "CF"])
def test_candidates_are_refused_with_the_version_that_dropped_them(text: str, tmp_path: Path) -> None:
    for read in (Pattern.parse, Pattern.from_key, PatternSpec.read):
        with pytest.raises(PatternError, match=re.escape(NO_CANDIDATES)) as refused:
            read(text)
        assert "\n" not in str(refused.value)
    model = ModelSection.of(describe(tiny_config(), "tiny"))
    file = PatternFile(schema="indexcache/v1", model=model, pattern="FSFFSS", retention=0.5)
    content = file.dumps()
    assert "FSFFSS" in content
    with pytest.raises(PatternFileError, match=re.escape(NO_CANDIDATES)) as refused:
        PatternFile.loads(content.replace("FSFFSS", text))
    assert "\n" not in str(refused.value)


def test_a_file_whose_name_has_a_c_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ModelSection.of(describe(tiny_config(), "tiny"))
    PatternFile(schema="indexcache/v1", model=model, pattern="FSFFSS", retention=0.5).save(Path("CF.yaml"))
    assert PatternSpec.read("CF.yaml").known() == Pattern("FSFFSS")


def test_letters_key_and_fingerprint_say_all_of_it() -> None:
    texts = ["FSFS+2q16", "FSFS+0q16", "FSFS+0q4+2q16", "FSFS"]
    patterns = [Pattern.parse(text) for text in texts]
    assert [pattern.letters for pattern in patterns] == texts == [str(pattern) for pattern in patterns]
    assert all(Pattern.from_key(pattern.key) == pattern for pattern in patterns)
    assert len({pattern.fingerprint for pattern in patterns}) == len(patterns)
    assert Pattern("FSFS").fingerprint == Pattern.parse("FSFS").fingerprint  # as it was before there were any
    with pytest.raises(PatternError, match="expected F or S"):
        Pattern("FSFS+2q16")  # what a plugin that does not know them makes of it
    assert Pattern.parse("FSFS+2q2").beginning(2) == Pattern.parse("FSFS").beginning(2)
    assert Pattern.parse("FSFS+2q2").beginning(3) != Pattern.parse("FSFS").beginning(3)


def test_changes_of_a_layer_keep_the_other_indexers() -> None:
    pattern = Pattern.parse("FFFS+1q4+2q4")
    assert pattern.share(1) == Pattern.parse("FSFS+2q4")
    assert pattern.unshare(3) == Pattern.parse("FFFF+1q4+2q4")
    assert pattern.selecting_for(0, 16) == Pattern.parse("FFFS+0q16+1q4+2q4")
    assert pattern.selecting_for(2, 16) == Pattern.parse("FFFS+1q4+2q16")
    assert pattern.selecting_for(1, 1) == Pattern.parse("FFFS+2q4")
    assert pattern.plain() == Pattern("FFFS")


def test_files_and_command_lines_take_them(tmp_path: Path) -> None:
    model = describe(tiny_config(), "tiny")
    file = PatternFile(
        schema="indexcache/v1",
        model=ModelSection.of(model),
        pattern="FSFFSS+2q4+3q8",
        retention=0.5,
        patterns={"1/2": "FSFFSS+2q4+3q8", "1/3": "FFSSSS"},
    )
    file.save(tmp_path / "pattern.yaml")
    loaded = PatternFile.load(tmp_path / "pattern.yaml")
    assert loaded == file and loaded.as_pattern() == Pattern.parse("FSFFSS+2q4+3q8")
    assert PatternSpec.read(f"{tmp_path}/pattern.yaml@1/2").known() == loaded.as_pattern()
    assert PatternSpec.read("FSFFSS+2q4+3q8").pattern(model) == loaded.as_pattern()
    text = (tmp_path / "pattern.yaml").read_text().replace("+2q4", "+2q5")
    with pytest.raises(PatternFileError, match="5 queries, expected one of"):
        PatternFile.loads(text)
    with pytest.raises(PatternError, match="4q4 is of F layers"):
        PatternSpec.read("FSFSSS+4q4")


def test_what_meant_an_earlier_definition_is_refused() -> None:
    """Files and keys that say blocks as versions before 0.2.0 did; and a file that says blocks and has none."""
    file = pattern_file(Pattern.parse("FSFFSS+2q4"), tiny_config())
    text, line = file.dumps(), "block_definition: 2\n"
    assert PatternFile.loads(text) == file and line in text
    for old, new, message in (
        (line, "", "block_definition: missing, and [+]6q16 has another meaning since version 0.2.0; expected 2 once"),
        (line, "block_definition: 1\n", "block_definition: found 1, expected 2"),
        ("+2q4", "", "block_definition: found 2, expected none"),
    ):
        with pytest.raises(PatternFileError, match=message):
            PatternFile.loads(text.replace(old, new))
    for key in ("FSFFSS+2q4", "FSFFSS+2q4|blocks1", "FSFFSS|blocks2"):
        with pytest.raises(PatternError, match="another definition"):
            Pattern.from_key(key)


# -- what is selected


def in_words(q: Tensor, k: Tensor, weights: Tensor, queries: int, topk: int, prompt: Tensor) -> list[list[set[int]]]:
    """`block_selection` one query after the other."""
    chosen: list[list[set[int]]] = []
    for row in range(len(q)):
        chosen.append([])
        for position in range(q.shape[1]):
            begin = position // queries * queries
            block = [at for at in range(begin, min(begin + queries, q.shape[1])) if prompt[row, at]]
            leader, shares = q[row, block].mean(0), weights[row, block].mean(0)
            scores = {t: float((torch.relu(leader @ k[row, t]) * shares).sum()) for t in range(begin)}
            near = list(range(begin, position + 1))
            far = sorted(scores, key=lambda t: -scores[t])[: topk - queries]
            chosen[row].append({*near, *far})
    return chosen


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_a_block_shares_what_its_mean_scores_highest(queries: int) -> None:
    torch.manual_seed(queries)
    q, k, weights = torch.randn(2, 43, 32, 8), torch.randn(2, 43, 8), torch.randn(2, 43, 32)
    prompt = torch.stack([torch.arange(43) < 43, torch.arange(43) < 30])
    found = block_selection(q, k, weights, queries, TOPK, prompt=prompt)
    expected = in_words(q, k, weights, queries, TOPK, prompt)
    for row in range(2):
        for position in range(43):
            if prompt[row, position]:
                real = found[row, position][found[row, position] >= 0].tolist()
                assert len(real) == len(set(real)) == len(expected[row][position])
                assert set(real) == expected[row][position]


def run(model: Any, pattern: str, tokens: Tensor, prompt: Tensor | None = None) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits, and the selections by letter, sorted, those that a query does not see as -1."""
    selected: dict[int, Tensor] = {}

    def observe(letter: int, indices: Tensor) -> None:
        seen = indices <= torch.arange(indices.shape[1])[:, None]
        selected[letter] = indices.masked_fill(~seen, -1).sort(dim=-1).values

    asked = None if prompt is None else prompt.expand(len(tokens), -1)
    with torch.inference_mode(), apply_roles(model, Pattern.parse(pattern), observe, prompt=asked):
        return model(input_ids=tokens, use_cache=False).logits, selected


def tokens_of(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(seed))


def test_only_prompts_select_in_blocks(config: dict[str, Any]) -> None:
    model, tokens = tiny_model(config), tokens_of()
    logits, own = run(model, "FSFSSS", tokens)
    shared, selected = run(model, "FSFSSS+2q4", tokens, PROMPT)
    begin = -(-TOPK // 4) * 4  # the first block of which a query has a choice
    assert torch.equal(selected[0], own[0]) and torch.equal(shared[:, :TOPK], logits[:, :TOPK])
    assert not torch.equal(selected[2][:, begin:-REPLY], own[2][:, begin:-REPLY])
    assert torch.equal(selected[2][:, -REPLY:], own[2][:, -REPLY:])  # layer 2 is the first that differs
    nothing, _ = run(model, "FSFSSS+2q4", tokens, torch.zeros_like(PROMPT))
    assert torch.equal(nothing, logits)


def test_replies_see_nothing_that_comes_later(config: dict[str, Any]) -> None:
    model, tokens, at = tiny_model(config), tokens_of(), SEQ_LEN - 6
    before, _ = run(model, "FFSSSS+1q8", tokens, PROMPT)
    changed = tokens.clone()
    changed[:, at] = (changed[:, at] + 1 - 3) % (VOCAB - 3) + 3
    after, _ = run(model, "FFSSSS+1q8", changed, PROMPT)
    assert torch.equal(before[:, :at], after[:, :at]) and not torch.equal(before[:, at:], after[:, at:])


def test_padding_before_a_sequence_is_refused_on_the_kernels(config: dict[str, Any]) -> None:
    model, tokens = tiny_model(config), tokens_of()
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    prompt = PROMPT.expand(2, -1)
    with use_kernels(model, "naive"), apply_roles(model, Pattern.parse("FFSFSS+1q4"), prompt=prompt):
        model(input_ids=tokens, use_cache=False)
        with pytest.raises(SearchError, match="no padding before it"):
            model(input_ids=tokens, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("pattern", ["FFSFSS+1q2+3q2", "FFSFSS+1q8+3q2", "FFFSFF+0q4+5q8"])
def test_the_kernels_select_the_same(config: dict[str, Any], pattern: str) -> None:
    model, tokens = tiny_model(config), tokens_of()
    expected, plain = run(model, pattern, tokens, PROMPT)
    with use_kernels(model, "naive"):
        found, selected = run(model, pattern, tokens, PROMPT)
    for letter in range(LAYERS):
        for row, position in ((row, position) for row in range(2) for position in range(SEQ_LEN)):
            sets = [set(chosen[letter][row, position].tolist()) - {-1} for chosen in (plain, selected)]
            assert sets[0] == sets[1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_prefix_reuse_gives_the_same_bits(config: dict[str, Any]) -> None:
    data = random_tokens(seq_len=SEQ_LEN).ending_in_replies(REPLY)
    texts = ["FFFFFF", "FSFSSS+2q4", "FSFSSS", "FSFSSS+0q2+2q4", "FFFSSS+1q8", "FSFSSS+2q4"]
    patterns = [Pattern.parse(text) for text in texts]
    cached, plain = tiny_engine(config), tiny_engine(config)
    for pattern in patterns:
        [found], [expected] = (
            list(engine.evaluate([pattern], data, "kl", fresh=fresh))
            for engine, fresh in ((cached, False), (plain, True))
        )
        assert found.losses == expected.losses
    again = list(cached.evaluate(patterns[1:2], data, "kl"))
    assert again[0].layer_tokens == (SEQ_LEN,) * data.num_sequences  # it is still known, but for the last layer
    losses = [item.losses for item in cached.evaluate(patterns[:4], data, "nll")]
    assert all(first != second for first, second in pairwise(losses))


# -- data, and refusals


def test_only_what_is_read_one_by_one_counts() -> None:
    data = random_tokens(seq_len=SEQ_LEN, sources=3)
    behind = data.ending_in_replies(REPLY)
    assert behind.prompt is not None and behind.sha256 != data.sha256
    assert behind.prompt.sum(1).tolist() == [SEQ_LEN - REPLY] * 3
    assert behind.scored.sum(1).tolist() == [REPLY - 1] * 3  # the first one of a reply is predicted by its prompt
    with pytest.raises(DataError, match="--reply is for models with indexers"):
        behind.ending_in_replies(REPLY)
    with pytest.raises(DataError, match=f"--reply is {SEQ_LEN}, expected fewer than the {SEQ_LEN} tokens"):
        data.ending_in_replies(SEQ_LEN)
    empty = replace(data, scored=data.scored & (np.arange(SEQ_LEN) < 20))
    with pytest.raises(DataError, match=f"source 0: none of its last {REPLY} tokens count, expected a larger --reply"):
        empty.ending_in_replies(REPLY)


def test_a_loss_that_sees_later_tokens_is_refused(config: dict[str, Any]) -> None:
    engine, data = tiny_engine(config), random_tokens(seq_len=SEQ_LEN)
    pattern = Pattern.parse("FFFFFF+2q4")
    leaking = TokenSet(data.tokens, data.scored, data.source_of, data.sources, np.ones_like(data.scored))
    for given in (data, leaking):
        with pytest.raises(SearchError, match="2q4: prompt tokens count"):
            list(engine.evaluate([pattern], given, "nll"))
    with pytest.raises(SearchError, match=f"16 queries at a time, expected at most index_topk .{TOPK}."):
        list(engine.evaluate([pattern.selecting_for(2, 16)], data.ending_in_replies(REPLY), "nll"))


def test_a_cache_is_refused(config: dict[str, Any]) -> None:
    model = tiny_model(config)
    with (
        apply_roles(model, Pattern.parse("FFFFFF+2q4"), prompt=PROMPT),
        pytest.raises(SearchError, match="no key/value"),
    ):
        model(input_ids=tokens_of(), use_cache=True)


def test_who_can_not_run_them_says_so() -> None:
    model = describe(tiny_v4_config(), "tiny")
    with pytest.raises(PatternError, match="2q4 is not served yet; expected F and S alone"):
        family_of(model.architecture).sglang.to_overrides({}, Pattern.full(model.num_layers).selecting_for(2, 4))
    for spelling in (to_sglang, to_vllm, indexer_types):
        with pytest.raises(PatternError, match="2q4 has no spelling in any engine"):
            spelling(Pattern.parse("FSFS+2q4"))
    v4 = tiny_model(tiny_v4_config())
    with (
        pytest.raises(SearchError, match="indexers of deepseek_v4 can't select in blocks"),
        apply_roles(v4, Pattern.parse("FFFF+2q4"), prompt=PROMPT),
    ):
        pass
    engine = SglangEngine.__new__(SglangEngine)
    with pytest.raises(PatternError, match="2q4 runs on transformers alone"):
        list(engine.evaluate([Pattern.parse("FFFF+2q4")], random_tokens(), "nll"))


def test_queries_divide_a_page() -> None:
    assert all(64 % queries == 0 for queries in QUERIES)


@pytest.mark.parametrize("command", ["distill", "offload"])
def test_commands_that_can_not_have_them_say_so(
    command: str, model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    apps = {"distill": distill_app, "offload": offload_app}
    arguments = ["--model", str(model_folder), "--seq-len", "32", "--output", str(tmp_path), "--pattern", "FFSFSS+1q4"]
    arguments += ["--training" if command == "distill" else "--evaluation", str(token_file)]
    result = CliRunner().invoke(apps[command], arguments)
    assert result.exit_code == 2 and "1q4 is not" in result.output and "expected F and S alone" in result.output


def test_eval_compares_them(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(model_folder),
        "--evaluation",
        str(token_file),
        "--seq-len",
        "32",
        "--num-sequences",
        "6",
    ]
    arguments += [
        "--no-uniform",
        "--output",
        str(tmp_path),
        "--pattern",
        "blocks=FFSFSS+1q4",
        "--pattern",
        "FFSSFS+1q2",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "the last 8 tokens of a sequence count (--reply 8)" in result.output, result.output
    assert json.loads((tmp_path / "eval.json").read_text())["held_out"]["scored_tokens"] == 6 * 7
    result = CliRunner().invoke(app, [*arguments, "--reply", "12", "--restart"])
    assert result.exit_code == 0 and "--reply" not in result.output, result.output
    rows = json.loads((tmp_path / "eval.json").read_text())["held_out"]["rows"]
    assert [row["pattern"] for row in rows][-2:] == ["FFSFSS+1q4", "FFSSFS+1q2"]
