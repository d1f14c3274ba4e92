"""Tokenizers that people have, and that refuse text: one line, before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import load_tokenizer
from tests.conftest import tiny_config
from tests.search.test_fuzz import one_line_or

VOCABULARY = {"a": 0, "b": 1}


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel(VOCABULARY, unk_token="[UNK]"),
        models.WordPiece(VOCABULARY, unk_token="[UNK]"),
        models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=None),
    ],
    ids=["WordLevel", "WordPiece", "Unigram"],
)
def test_a_tokenizer_without_its_unknown_token_is_refused(model: models.Model, tmp_path: Path) -> None:
    save(model, tmp_path)
    assert one_line_or(lambda: load_tokenizer(str(tmp_path))) is None
    with pytest.raises(SearchError, match="its tokenizer refuses words that it does not know, expected an unk_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: b"\xef\xbb\xbf" + text, "begins with a byte order mark, which JSON must not; expected UTF-8"),
        (lambda text: text[: len(text) // 2], "not JSON: is cut off before its end; expected the whole file"),
        (lambda text: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer, not the file"),
    ],
    ids=["mark", "cut", "pointer"],
)
def test_a_damaged_file_of_a_tokenizer_is_named(
    name: str, change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    save(models.WordLevel({**VOCABULARY, "[UNK]": 2}, unk_token="[UNK]"), tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(SearchError, match=f"^{tmp_path / name}: {message}"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_with_one_is_taken(tmp_path: Path) -> None:
    save(models.WordLevel({**VOCABULARY, "[UNK]": 2}, unk_token="[UNK]"), tmp_path)
    assert load_tokenizer(str(tmp_path)).encode("a c b", add_special_tokens=False) == [0, 2, 1]


def save(model: models.Model, folder: Path) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(tiny_config()))
