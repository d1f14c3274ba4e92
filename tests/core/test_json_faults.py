"""Files that should be JSON and are not: each is refused with what it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_indexcache.check import main
from sglang_indexcache.io.atomic import read_json_object
from sglang_indexcache.io.errors import FileError
from tests.conftest import tiny_config

GOOD = json.dumps({**tiny_config(), "name": "é \\ n", "eps": 1e-06, "off": False}, ensure_ascii=False, indent=2)


def fault(data: bytes, folder: Path) -> str:
    path = folder / "config.json"
    path.write_bytes(data)
    with pytest.raises(FileError) as error:
        read_json_object(path, 1 << 20)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty; expected the whole file"),
        (b" \r\n", "is empty; expected the whole file"),
        (bytes(4096), "holds 4096 zero bytes, as after a full disk; expected the whole file"),
        (b"\xef\xbb\xbf" + GOOD.encode(), "begins with a byte order mark, which JSON must not; expected UTF-8 without"),
        (GOOD.encode("utf-16"), "not UTF-8, but UTF-16; expected UTF-8 without a byte order mark"),
        (GOOD.encode("utf-16-le"), "not UTF-8, but UTF-16"),
        (GOOD.encode("latin-1"), "not JSON: not UTF-8 at byte "),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a Git LFS pointer, .*`git lfs pull`"),
        (b"<!DOCTYPE html>\n<html><title>Access\ndenied</title>", r"is a web page \(Access denied\), as a failed"),
        (b'\n<?xml version="1.0"?><Error><Code>AccessDenied', "is a web page, as a failed download leaves"),
        (b"\x1f\x8b\x08\x00", r"is packed \(gzip\); expected it unpacked"),
        (b"Internal Server Error", "not JSON: begins with 'Internal Server Error'"),
        (b"Entry not found", "not JSON: begins with 'Entry not found'"),
        (b"[1, 2]", "found list, expected a JSON object"),
        (b"null", "found NoneType, expected a JSON object"),
        (b'{\n"a": 1, // why\n"b": 2}', "not JSON: line 2 has a comment; expected none"),
        (b'# a\n{"a": 1}', "not JSON: line 1 has a comment"),
        (b'{"a": 1}\n/* end */', "not JSON: line 2 has a comment"),
        (b'{"a": 1,,\n"b": 2}', "not JSON: line 1 has a comma too many"),
        (b'{"a": [1, 2,\n]}', "not JSON: line 2 has a comma too many"),
        (b'{"a": 1}\n{"a": 2}', "not JSON: line 2 goes on after the end"),
        (b"{'a': 1}", "not JSON: line 1, column 2: expecting property name enclosed in double quotes"),
        (b'{"a": True}', "not JSON: line 1, column 7: expecting value"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: a number of too many digits"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_each_fault_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    line = fault(data, tmp_path)
    assert re.match(message, line), line


def test_wherever_a_file_is_cut_off_it_is_said_to_be(tmp_path: Path) -> None:
    whole = GOOD.encode()
    for end in range(1, len(whole)):
        assert fault(whole[:end], tmp_path) == "not JSON: is cut off before its end; expected the whole file", end


def test_a_damaged_config_is_one_line_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert main(["FSSFSS", "--model", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert "config.json: begins with a byte order mark" in line and line.count("\n") == 1
