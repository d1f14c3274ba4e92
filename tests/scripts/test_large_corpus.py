"""The large corpus: what becomes a document, what repeats, and pieces that are whole or refused by name."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from indexcache_search.errors import FolderError
from indexcache_search.workdir.lock import locked
from scripts.large_corpus import archives, build, pieces
from scripts.large_corpus.archives import Archives, members
from scripts.large_corpus.build import Build
from scripts.large_corpus.documents import chosen, documents, is_worth, kind_of
from scripts.large_corpus.duplicates import Seen, fingerprints
from scripts.large_corpus.sources import SOURCES, Source

DOWNLOAD = Archives._download
WORDS = (
    "the of and to in a is that for it as was with be by on not his which tensor packet engine window stream".split()
)


def prose(seed: int, words: int = 400) -> str:
    """Text in which no two seeds have a passage in common."""
    rng = random.Random(seed)
    chosen_ = [rng.choice(WORDS) for _ in range(words)]
    return "\n".join(" ".join(chosen_[start : start + 12]) for start in range(0, words, 12)) + ".\n"


def code(seed: int) -> str:
    rng = random.Random(seed)
    names = [f"{rng.choice(WORDS)}_{rng.choice(WORDS)}_{rng.choice('abcdefgh')}" for _ in range(90)]
    return "".join(f"def {name}(value):\n    return {name[::-1]} + value\n" for name in names)


KINDS = ("code", "prose")  # in the order of their names
FILES = {
    "manual": {f"manual/doc/chapter{number}.txt": prose(number) for number in range(260)},
    "library": {
        **{f"library/src/part{number}.py": code(number) for number in range(160)},
        "library/doc/again.txt": prose(7).replace("\n", " "),
        "library/doc/markers.txt": prose(900) + "<|eos|>\n",
    },
    "apart": {
        "apart/doc/one.txt": prose(1000),
        "apart/doc/two.txt": prose(1001),
        "apart/src/one.py": code(1000),
    },
    "copier": {"copier/doc/one.rst": prose(1000, 200) + prose(1002, 220), "copier/doc/two.rst": prose(1003)},
}
SOURCES_HERE = (
    Source("manual", "source", 9, 0),
    Source("library", "wheel", 9, 9),
    Source("copier", "source", 9, 9),
    Source("apart", "deb", 9, 9, held_out=True),
)


def pack(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Archives come from here; return the names of the sources that were fetched."""
    fetched: list[str] = []

    def download(self: Archives, source: Source, place: Path) -> None:
        fetched.append(source.name)
        pack(place / f"{source.name}.tar.gz", FILES[source.name])

    monkeypatch.setattr(Archives, "_download", download)
    return fetched


def made(folder: Path) -> Build:
    return Build(folder, SOURCES_HERE, vocab_size=400, piece=150_000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            Archives,
            "_download",
            lambda self, source, place: pack(place / f"{source.name}.tar.gz", FILES[source.name]),
        )
        made(folder).make(least=1000)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".xz", ".json")}


def test_pieces_hold_parts_and_kinds_apart(whole: Path) -> None:
    found, _ = pieces.read_manifest(whole / "pieces" / "manifest.json")
    names = {item.name for item in found}
    assert {"train-prose-00", "train-prose-01", "train-code-00", "evaluation-prose-00"} <= names
    assert {"packages-prose-00", "packages-code-00"} <= names
    texts = [json.loads(line)["text"] for path in (whole / "kept").glob("*.jsonl") for line in path.open()]
    assert len(texts) == len(set(texts))
    kept = {json.loads(line)["path"] for path in (whole / "kept").glob("*.jsonl") for line in path.open()}
    assert "library/doc/again.txt" not in kept  # chapter 7 in other lines
    assert "copier/doc/one.rst" not in kept  # half of it is held out
    assert "library/doc/markers.txt" not in kept and "copier/doc/two.rst" in kept
    assert 1 <= sum(item.documents for item in found if item.part[0] == "evaluation") <= 15


def test_killed_anywhere_it_ends_with_the_same_pieces(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: list[str]
) -> None:
    """Killed before each file gets its name, and after it."""
    rename, left = Path.rename, [0]

    def dying(when: int) -> Callable[[Path, Path], Path]:
        def replaced(self: Path, target: Path) -> Path:
            left[0] -= 1
            if left[0] == 0 and when == 0:
                raise KeyboardInterrupt
            path = rename(self, target)
            if left[0] == 0:
                raise KeyboardInterrupt
            return path

        return replaced

    runs = 0
    for when in (0, 1) * 20:
        monkeypatch.setattr(Path, "rename", dying(when))
        left[0] = 1 + when
        try:
            made(tmp_path).make(least=1000)
        except KeyboardInterrupt:
            runs += 1
            continue
        break
    monkeypatch.setattr(Path, "rename", rename)
    made(tmp_path).make(least=1000)
    assert 16 <= runs < 40  # each file of documents, the parts, the tokenizer and each piece
    assert files(tmp_path / "pieces") == files(whole / "pieces")
    assert sorted(set(registry)) == sorted(source.name for source in SOURCES_HERE)
    assert len(registry) == len(SOURCES_HERE)  # none twice


def test_too_few_tokens_end_it_and_other_settings_are_refused(whole: Path) -> None:
    with pytest.raises(SystemExit, match=r"tokens to train on, expected 10,000,000 or more"):
        made(whole).make(least=10_000_000)
    with pytest.raises(SystemExit, match=r"settings\.json: other vocab_size, piece than these, expected the same"):
        Build(whole, SOURCES_HERE, vocab_size=500, piece=2.0).make(least=1)


def test_an_archive_that_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Archives(tmp_path)
    [path] = known.fetch(SOURCES_HERE[0])
    assert known.fetch(SOURCES_HERE[0]) == [path]
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(
        SystemExit, match=r"manual: .*other files, expected manual\.tar\.gz as .*archives\.json has them"
    ):
        known.fetch(SOURCES_HERE[0])
    monkeypatch.setattr(Archives, "_download", lambda self, source, place: None)
    with pytest.raises(SystemExit, match="library: no archive came"):
        Archives(tmp_path / "other").fetch(SOURCES_HERE[1])


@pytest.mark.parametrize("source", [Source("library==1.0", "sdist", 1, 0), Source("manual", "deb", 1, 0)], ids=str)
def test_archives_lie_in_a_folder_that_is_named_from_here(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where clients run elsewhere: pip is told a folder, apt-get downloads to the one it runs in."""

    def client(command: list[str], cwd: Path | None = None, **_: Any) -> SimpleNamespace:
        place = Path(command[command.index("-d") + 1]) if "-d" in command else Path()
        if "update" not in command:
            (tmp_path / (cwd or ".") / place / "library.tar.gz").write_bytes(b"archive")
        for option in command:
            assert Path(option.partition("=")[2]).is_absolute() or not option.startswith("-oDir"), option
        return SimpleNamespace(returncode=0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Archives, "_download", DOWNLOAD)
    monkeypatch.setattr(archives.subprocess, "run", client)
    assert Archives(Path("large")).fetch(source) == [tmp_path / "large" / "archives" / source.name / "library.tar.gz"]


def test_one_writer_at_a_time(whole: Path, tmp_path: Path) -> None:
    with locked(whole, "another"), pytest.raises(FolderError, match="another is using this folder"):
        made(whole).make(least=1)
    with locked(tmp_path, "another"), pytest.raises(FolderError, match="another is using this folder"):
        pieces.join([whole / "pieces"], tmp_path, partial=False)


def test_what_is_joined_is_what_trainings_read(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces.join([whole / "pieces"], tmp_path, partial=False)
    arrays = np.load(tmp_path / "corpus.npz")
    found, _ = pieces.read_manifest(whole / "pieces" / "manifest.json")
    for part in ("train", "evaluation", "packages"):
        assert arrays[part].size == sum(item.tokens for item in found if item.part[0] == part) > 0
    assert arrays["packages"].size == arrays["packages-prose"].size + arrays["packages-code"].size
    assert arrays.files == ["words", *pieces.PARTS, *(f"{part}-{kind}" for part in pieces.PARTS[1:] for kind in KINDS)]
    texts = {json.loads(line)["text"] for line in (tmp_path / "packages.jsonl").open()}
    assert texts == set(FILES["apart"].values())
    assert arrays["train"].dtype == np.uint16 and "words" in arrays.files
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("corpus.npz", "evaluation.jsonl", "packages.jsonl", "tokenizer.json"),
    ]
    assert "100% of all" in capsys.readouterr().out


@pytest.fixture
def carried(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "carried"
    folder.mkdir()
    for path in (whole / "pieces").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_lost_pieces_are_refused_by_name(carried: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "corpus"
    (carried / "train-prose-01.xz").rename(tmp_path / "train-prose-01.xz")
    with pytest.raises(SystemExit, match=r"missing: train-prose-01; expected all \d+ pieces, or --partial"):
        pieces.join([carried], output, partial=False)
    assert not (output / "corpus.npz").exists()
    pieces.join([carried], output, partial=True)
    some = np.load(output / "corpus.npz")["train"].size
    pieces.join([carried, tmp_path], output, partial=False)
    assert 0 < some < np.load(output / "corpus.npz")["train"].size
    assert capsys.readouterr().out.count("% of all") == 2
    (carried / "evaluation-prose-00.xz").unlink()
    with pytest.raises(SystemExit, match=r"missing: .*evaluation-prose-00.*; expected all"):
        pieces.join([carried], output, partial=True)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["train-code-00.xz", "packages-prose-00.xz", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip], ids=["cut", "flipped"])
def test_damaged_pieces_are_refused_by_name(
    carried: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(carried / name)
    with pytest.raises(SystemExit, match=rf"{name}: .*expected"):
        pieces.join([carried], tmp_path / "corpus", partial=True)
    assert not (tmp_path / "corpus" / "corpus.npz").exists()


def test_the_next_version_is_refused(carried: Path, tmp_path: Path) -> None:
    path = carried / "manifest.json"
    path.write_text(path.read_text().replace("indexcache-corpus/v1", "indexcache-corpus/v2"))
    with pytest.raises(
        SystemExit, match=r"manifest\.json: schema is indexcache-corpus/v2, expected indexcache-corpus/v1"
    ):
        pieces.join([carried], tmp_path / "corpus", partial=False)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("linux/Documentation/mm/slab.rst", "prose"),
        ("usr/share/doc/RFC/standard/rfc791.txt.gz", "prose"),
        ("usr/share/doc/RFC/standard/rfc791.html.gz", None),
        ("git/builtin/log.c", "code"),
        ("git/t/t0001.sh", None),
        ("x/tests/long.py", None),
        ("x/po/de.txt", None),
        ("x/COPYING.txt", None),
        ("x/lib.min.js", None),
        ("x/picture.png", None),
    ],
)
def test_what_is_read(path: str, kind: str | None) -> None:
    assert kind_of(path) == kind


def test_what_reads_as_prose_and_code() -> None:
    assert is_worth(prose(1), "prose") and is_worth(code(1), "code")
    german = "Der Text ist in einer anderen Sprache verfasst und wird nicht gelesen. " * 20
    table = "\n".join(f"{number} 0x{number:08x} {number * 7}" for number in range(300))
    assert not any(is_worth(text, "prose") for text in (german, table, "é à ü ö " * 200))
    assert not any(is_worth(text, "code") for text in (table, "x = " + "abcdefgh" * 4000, "{};;" * 900))


def test_markup_and_notices_go(tmp_path: Path) -> None:
    notice = "/* Copyright 2020 Somebody.\n * Licensed under the terms. */\n/* What it does. */\n"
    pages = "\n\n\nPostel          [Page 1]\n\fRFC 791         September 1981\n\n\n"
    given = {
        "a/page.html": f"<html><script>let x = 1 < 2;</script><p>{prose(1)}</p>&amp;</html>",
        "b/part.c": notice + "int values(void) {\n    return the_value;\n}\n" * 30,
        "c/rfc/rfc1.txt": prose(2) + pages + prose(3),
        "d/man/tool.1": '.\\" Copyright\n.SH NAME\n.B tool\n\\- the \\fBname\\fR of it\n' + prose(4),
    }
    pack(tmp_path / "a.tar.gz", given)
    files_ = chosen(members(tmp_path / "a.tar.gz"), {"prose": 1, "code": 1})
    texts = {item.path: item.text for item in documents(files_)}
    assert set(texts) == set(given)
    assert "<" not in texts["a/page.html"] and "let x" not in texts["a/page.html"] and "&" in texts["a/page.html"]
    assert texts["b/part.c"].startswith("/* What it does. */")
    assert "[Page" not in texts["c/rfc/rfc1.txt"] and "September 1981" not in texts["c/rfc/rfc1.txt"]
    assert "NAME\n\ntool\n- the name of it\n" in texts["d/man/tool.1"]


def test_no_more_of_a_package_than_is_wanted_and_always_the_same(tmp_path: Path) -> None:
    given = [(f"x/part{number}.py", 1000, code(number).encode()) for number in range(50)]
    some = chosen(given, {"prose": 1.0, "code": 0.1})
    assert 80_000 < sum(len(data) for _, _, data in some) <= 100_000
    assert chosen(given[::-1], {"prose": 1.0, "code": 0.1}) == some
    assert [path for path, _, _ in some] != [path for path, _, _ in sorted(given)][: len(some)]


def test_repeated_passages_are_found_whatever_their_lines_are() -> None:
    seen = Seen()
    for number in range(20):
        seen.add(fingerprints(prose(number)))
    comment = "".join(f" * {line.upper()}\n" for line in prose(3).splitlines())
    assert seen.share(fingerprints(comment)) == 1.0
    assert seen.share(fingerprints(prose(50))) < 0.1
    assert 0.3 < seen.share(fingerprints(prose(3, 400) + prose(51, 400))) < 0.7
    assert fingerprints("too short").size == 0 and seen.share(fingerprints("")) == 0.0
    assert 0.6 < fingerprints(prose(60, 16_000)).size / (16_000 / 16) < 1.4


def test_sources_are_named_once() -> None:
    names = [source.name for source in SOURCES]
    assert len(names) == len(set(names))
    assert all(("==" in source.name) == (source.kind in ("wheel", "sdist")) for source in SOURCES)
    assert build.MOST_OF_A_DICTIONARY < 2**16
