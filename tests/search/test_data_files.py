"""Files and folders as people have them: formats, marks, compression, what is cloned and saved."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexcache_search.data.formats import records
from indexcache_search.data.sources import rows
from indexcache_search.errors import DataError, RowError

ROWS = [{"text": f'Row {number}, with a "quote" and\na line, ü.'} for number in range(5)]
TEXTS = {row["text"] for row in ROWS}
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = "text\r\n" + "".join('"' + row["text"].replace('"', '""') + '"\r\n' for row in ROWS)


def table() -> pa.Table:
    return pa.table({"text": [row["text"] for row in ROWS]})


def arrow(path: Path, stream: bool) -> None:
    with (
        pa.OSFile(str(path), "wb") as file,
        (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, table().schema) as out,
    ):
        out.write_table(table(), 2)


def zstd(content: bytes) -> bytes:
    compressed: bytes = pa.compress(content[:40], "zstd", asbytes=True) + pa.compress(
        content[40:], "zstd", asbytes=True
    )
    return compressed


def read(source: Path | str) -> set[str]:
    found = set()
    for place, record in rows(str(source), 0):
        assert not isinstance(record, RowError), (place, record)
        found.add(record["text"])
    return found


FILES: dict[str, Callable[[Path], Any]] = {
    "rows.jsonl": lambda path: path.write_text(LINES),
    "ROWS.JSONL": lambda path: path.write_text(LINES),
    "rows.ndjson": lambda path: path.write_text("\n" + LINES),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: path.write_text(LINES),
    "rows.csv": lambda path: path.write_text(CSV, newline=""),
    "marked.csv": lambda path: path.write_bytes(CSV.encode("utf-8-sig")),
    "marked.jsonl": lambda path: path.write_bytes(LINES.encode("utf-8-sig")),
    "marked.json": lambda path: path.write_bytes(json.dumps(ROWS).encode("utf-8-sig")),
    "appended.jsonl": lambda path: path.write_text("".join(f"\ufeff{line}" for line in LINES.splitlines(True))),
    "sixteen.jsonl": lambda path: path.write_bytes(LINES.encode("utf-16")),
    "thirtytwo.jsonl": lambda path: path.write_bytes(LINES.encode("utf-32")),
    "rows.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(LINES.encode()[:50]) + gzip.compress(LINES.encode()[50:])
    ),
    "rows.Json.GZ": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS, indent=1).encode())),
    "rows.jsonl.zst": lambda path: path.write_bytes(zstd(LINES.encode())),
    "rows.csv.zst": lambda path: path.write_bytes(zstd(CSV.encode("utf-8-sig"))),
    "rows.parquet": lambda path: pq.write_table(table(), path),
    "rows.arrow": lambda path: arrow(path, stream=False),
    "stream.arrow": lambda path: arrow(path, stream=True),
}


@pytest.mark.parametrize("name", FILES)
def test_formats(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / name)
    assert read(tmp_path / name) == TEXTS


def test_one_object_over_several_lines_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(ROWS[0], indent=1))
    assert read(tmp_path / "x.json") == {ROWS[0]["text"]}


def test_fields_that_only_other_rows_have_are_not_there(tmp_path: Path) -> None:
    """Tables give every message the fields of each."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"q": 1}}]},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}, {"messages": None}]), tmp_path / "x.parquet")
    found = [record for _, record in records(tmp_path / "x.parquet")]
    assert found == [{"messages": messages}, {"messages": None}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": ', "line 2: not JSON"),
        ("x.csv", b'text,id\n"a",1\nb\n', "row 2: found 1 cells, expected 2"),
        ("x.csv", b'text\n"a"b\n', "row 1: not CSV"),
        ("x.csv", b"text,text\na,b\n", "line 1: found 2 names of columns, expected each once"),
        ("x.json", b'[{"text": "a"},\n]', r"x.json: not JSON \(line 2\)"),
        ("x.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-20], "x.jsonl.gz: can't be read"),
        ("x.jsonl.gz", b"text", "x.jsonl.gz: can't be read"),
        ("x.jsonl.zst", b"text", "x.jsonl.zst: can't be read"),
        ("x.arrow", b"ARROW1", "x.arrow: can't be read"),
        ("x.arrow", b"", "x.arrow: can't be read"),
        ("x.parquet", b"PAR1", "x.parquet: can't be read"),
        ("x.jsonl", "a".encode("utf-16")[:3], "x.jsonl: can't be read"),
        (
            "x.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "is a Git LFS pointer.*git lfs",
        ),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        for place, record in records(tmp_path / name):
            if isinstance(record, RowError):
                raise DataError(f"{place}: {record}")
    assert str(caught.value).isprintable()


def test_endings_that_are_not_read(tmp_path: Path) -> None:
    for name in ("x.parquet.gz", "x.gz", "x.xlsx", "x"):
        (tmp_path / name).write_text("")
        with pytest.raises(DataError, match=r"ending is .*, expected .jsonl, .ndjson"):
            read(tmp_path / name)


# -- folders


def lines(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"text": text}) + "\n")


def notes_of(folder: Path) -> list[str]:
    notes: list[str] = []
    list(rows(str(folder), 0, notes.append))
    return [note.removeprefix(f"{folder}: ") for note in notes]


def test_a_clone_of_a_data_set(tmp_path: Path) -> None:
    for name in ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"):
        lines(tmp_path / name, name[:17])
    lines(tmp_path / "data/test-00000-of-00001.jsonl", "held out")
    lines(tmp_path / ".cache/train.jsonl", "hidden")
    lines(tmp_path / "__MACOSX/train.jsonl", "hidden")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    (tmp_path / "LICENSE.txt").write_text("Anything.")
    (tmp_path / ".gitattributes").write_text("*.jsonl filter=lfs\n")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert read(tmp_path) == {"data/train-00000-", "data/train-00001-"[:17]}
    assert notes_of(tmp_path) == [
        "LICENSE.txt and 1 more is not read: no data",
        "data/test-00000-of-00001.jsonl is not read: held out by its name",
    ]


def test_splits_by_name(tmp_path: Path) -> None:
    lines(tmp_path / "one/test.jsonl", "a")
    assert read(tmp_path / "one") == {"a"}  # there is no other
    lines(tmp_path / "two/contest.jsonl", "a")
    lines(tmp_path / "two/latest.jsonl", "b")
    assert read(tmp_path / "two") == {"a", "b"}  # words that only hold a split's
    lines(tmp_path / "both/test.jsonl", "a")
    lines(tmp_path / "both/valid.jsonl", "b")
    with pytest.raises(DataError, match="holds the splits test and validation; name the file that is meant"):
        read(tmp_path / "both")


def test_folders_of_text_and_of_two_kinds(tmp_path: Path) -> None:
    for name in ("README.md", "a.md", "b.txt"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == {"a.md", "b.txt"} and notes_of(tmp_path) == ["README.md is not read: no data"]
    lines(tmp_path / "c.jsonl", "c")
    assert read(tmp_path) == {"c"}
    pq.write_table(table(), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"holds .jsonl, .parquet files, expected one kind; name the file or folder"):
        read(tmp_path)


def test_what_datasets_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    (tmp_path / "one/cache-0123.arrow").write_bytes((tmp_path / "one/data-00000-of-00002.arrow").read_bytes()[:50])
    assert read(tmp_path / "one") == TEXTS
    splits = datasets.DatasetDict({"train": made.select([0, 1]), "test": made.select([2])})
    splits.save_to_disk(str(tmp_path / "dict"))
    assert read(tmp_path / "dict") == {row["text"] for row in ROWS[:2]}
    assert notes_of(tmp_path / "dict") == ["of the splits train, test train is read"]
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["validation", "test"]}')
    with pytest.raises(
        DataError, match=r"holds the splits validation, test; name the folder of one, such as .*validation"
    ):
        read(tmp_path / "dict")
    for content, message in (
        ('{"splits": ["../one"]}', "holds the splits"),
        ('{"splits": 7}', "splits is 7, expected a list"),
    ):
        (tmp_path / "dict/dataset_dict.json").write_text(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path / "dict")
    (tmp_path / "one/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002.arrow: no such file, but state.json lists it"):
        read(tmp_path / "one")


def test_hub_ids_may_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*arguments: str, split: str, streaming: bool) -> Any:
        asked.append((*arguments, split))
        assert streaming
        return datasets.IterableDataset.from_generator(lambda: iter(ROWS))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("owner/name") == read("owner/name:sub") == read("owner/name::test") == TEXTS
    assert asked == [("owner/name", "train"), ("owner/name", "sub", "train"), ("owner/name", "test")]
    with pytest.raises(DataError, match="a hub id is owner/name, owner/name:subset or with :split behind it"):
        read("owner/name:a:b:c")


def test_a_hub_id_without_the_split_says_how_to_name_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: str, split: str, **__: Any) -> Any:
        raise ValueError(f'Bad split: {split}. Available splits: ["test"]')

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"Available splits: .*; owner/name:subset:split names another split"):
        read("owner/name")


def test_a_search_needs_no_home_folder_and_imports_no_models(tmp_path: Path) -> None:
    """In containers it may be read-only or missing, where datasets keeps its cache by default. Models of transformers
    take seconds, before each dry run and each search in SGLang."""
    (tmp_path / "rows.jsonl").write_text(LINES)
    program = (
        "import sys, indexcache_search.searching.run; assert 'transformers.modeling_utils' not in sys.modules\n"
        f"from indexcache_search.data.sources import rows\nprint(len(list(rows({str(tmp_path / 'rows.jsonl')!r}, 0))))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment = {**kept, "HOME": "/dev/null/home", "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{len(ROWS)}\n", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
