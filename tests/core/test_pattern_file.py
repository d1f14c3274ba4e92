"""Pattern files: exact round trips, strict reading, one line for every mistake."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe
from sglang_indexcache.io.errors import PatternError, PatternFileError, is_hidden
from sglang_indexcache.io.messages import BEGINS_SHARED, NO_INDEXER, OTHER_LENGTH
from tests.conftest import tiny_config

GOOD = """\
schema: indexcache/v1
model:
  architecture: GlmMoeDsaForCausalLM
  num_layers: 8
  config_sha256: 00e4c2f6a1b3d5978c0e2f4a6b8d1c3e5f7092a4b6c8d0e1f3a5b7c9d0e2f4a6
  name: zai-org/GLM-5-FP8
  locked_layers: [6]
pattern: FSFFFFSS
retention: 0.625
trajectory:
- {layer: 7, pattern_loss: 1.25, stderr: 0.001}
- {layer: 1, pattern_loss: 1.2500000000000002}
- {layer: 3, pattern_loss: 1.3, stderr: 1.0e-05}
- {layer: 4, pattern_loss: 2}
search: {strategy: greedy, objective: nll, baseline_loss: 1.2, loss: 1.25, evaluations: 22, seed: 0, noise_floor: 0.0}
calibration:
  sources: [sft.jsonl]
  sha256: ffe4c2f6a1b3d5978c0e2f4a6b8d1c3e5f7092a4b6c8d0e1f3a5b7c9d0e2f4a6
  sequences: 64
  seq_len: 32768
  scored_tokens: 1966016
versions: {sglang_indexcache: 0.1.0, engine: transformers 5.23.0}
created: '2026-11-21'
"""


def good(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load(GOOD), **changes}


def refused(text: str | bytes) -> str:
    with pytest.raises(PatternFileError) as caught:
        PatternFile.loads(text, "deploy.yaml")
    message = str(caught.value)
    assert message.startswith("deploy.yaml: ")
    assert "\n" not in message and len(message) < 400
    return message.removeprefix("deploy.yaml: ")


def test_round_trip_is_exact(tmp_path: Path) -> None:
    file = PatternFile.loads(GOOD)
    assert PatternFile.loads(file.dumps()) == file
    assert PatternFile.loads(file.dumps()).dumps() == file.dumps()
    file.save(tmp_path / "deploy" / "p.yaml")
    assert PatternFile.load(tmp_path / "deploy" / "p.yaml") == file
    assert list((tmp_path / "deploy").iterdir()) == [tmp_path / "deploy" / "p.yaml"]


def test_a_person_can_read_it() -> None:
    lines = PatternFile.loads(GOOD).dumps().splitlines()
    assert lines[0] == "schema: indexcache/v1"
    assert "pattern: FSFFFFSS" in lines
    assert "- {layer: 7, pattern_loss: 1.25, stderr: 0.001}" in lines


def test_numbers_that_look_like_something_else_survive() -> None:
    for digest in ("1" * 64, "0" * 63 + "1", "12e4" + "5" * 60):
        content = good()
        content["model"]["config_sha256"] = digest
        file = PatternFile.model_validate(content)
        assert PatternFile.loads(file.dumps()).model.config_sha256 == digest


@given(name=st.text(max_size=40))
def test_what_is_written_is_read_back(name: str) -> None:
    """Names that look like numbers, hold line breaks, or what an editor does not show."""
    content = good()
    content["model"]["name"] = name
    file = PatternFile.model_validate(content)
    assert PatternFile.loads(file.dumps()) == file
    assert not any(map(is_hidden, file.dumps().replace("\n", "")))


@pytest.mark.parametrize(
    ("retention", "roles"), [("7/8", "FFFFFFSF"), ("3/4", "FFFFFFSS"), ("5/8", "FSFFFFSS"), ("0.375", "FSFSSFSS")]
)
def test_one_file_serves_any_retention_of_its_trajectory(tmp_path: Path, retention: str, roles: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(GOOD)
    file = PatternFile.load(f"{path}@{retention}")
    assert file.as_pattern() == Pattern(roles)
    assert file.retention == Pattern(roles).retention
    assert PatternFile.loads(file.dumps()) == file


def test_a_retention_that_is_not_there_names_the_range(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(GOOD)
    with pytest.raises(PatternFileError, match=r"p\.yaml@1/8: retention 1/8 keeps 1 of 8 layers F.*with 3 to 7"):
        PatternFile.load(f"{path}@1/8")
    with pytest.raises(PatternFileError, match="retention is 'half'"):
        PatternFile.load(f"{path}@half")
    with pytest.raises(PatternFileError, match=r"nothing\.yaml: No such file"):
        PatternFile.load(tmp_path / "nothing.yaml@1/2")
    with pytest.raises(PatternFileError, match="directory"):
        PatternFile.load(tmp_path)


def test_a_path_with_an_at_sign_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml@1"
    path.write_text(GOOD)
    assert PatternFile.load(path).pattern == "FSFFFFSS"


def test_patterns_by_retention_come_before_the_trajectory() -> None:
    file = PatternFile.loads(yaml.safe_dump(good(patterns={"5/8": "FFFFSSSF", "1/8": "FSSSSSSS"})))
    assert file.pattern_at(Fraction(5, 8)).roles == "FFFFSSSF"
    assert file.pattern_at(Fraction(1, 8)).roles == "FSSSSSSS"
    assert file.pattern_at(Fraction(3, 4)).roles == "FFFFFFSS"


def test_a_hand_written_file_needs_little() -> None:
    content = {key: good()[key] for key in ("schema", "model", "pattern", "retention")}
    file = PatternFile.loads(yaml.safe_dump(content))
    assert file.pattern_at(Fraction(5, 8)).roles == "FSFFFFSS"
    with pytest.raises(PatternError, match="with 5"):
        file.pattern_at(Fraction(1, 2))


def edited(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets values by path (`model__name`), or deletes them (`KeyError`)."""

    def edit(content: dict[str, Any]) -> None:
        for path, value in changes.items():
            *parents, last = path.split("__")
            target = content
            for key in parents:
                target = target[int(key)] if isinstance(target, list) else target[key]
            if value is KeyError:
                del target[last]
            else:
                target[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edited(schema="indexcache/v2"), "schema: found 'indexcache/v2', expected: 'indexcache/v1'"),
        (edited(schema=KeyError), "schema: missing"),
        (edited(retain=0.5), "retain: unknown key"),
        (edited(search__speed=1), "search.speed: unknown key"),
        (edited(trajectory__0__note="x"), "trajectory[0].note: unknown key"),
        (edited(model__num_layers="8"), "model.num_layers: found '8', expected: a valid integer"),
        (edited(model__num_layers=9), OTHER_LENGTH.format(8, 9)),
        (edited(model__config_sha256="abc"), "model.config_sha256: found 'abc'"),
        (edited(model__locked_layers=[0]), "model.locked_layers: found 0, expected 1 to 7"),
        (edited(model__locked_layers=[5]), f"F for layer 5, but the checkpoint has {NO_INDEXER}"),
        (edited(pattern="FSFFFFFS"), f"F for layer 6, but the checkpoint has {NO_INDEXER}"),
        (edited(pattern="SSFFFFSS"), f"pattern: {BEGINS_SHARED}"),
        (edited(pattern="FSFFFFSs"), "pattern: pattern has 's' for layer 7"),
        (edited(pattern=["F"]), "pattern: found ['F'], expected: a valid string"),
        (edited(retention=0.5), "retention: found 0.5, but pattern keeps 0.6250 of its layers"),
        (edited(retention=float("nan")), "retention: found nan"),
        (edited(pattern="FFSFFFSS"), "pattern: is neither a step of trajectory nor one of patterns"),
        (edited(trajectory__1__layer=7), "trajectory[1]: layer 7 of FFFFFFSS is not an F layer"),
        (edited(trajectory__1__layer=8), "trajectory[1]: layer 8"),
        (edited(trajectory__2__pattern_loss=float("inf")), "trajectory[2].pattern_loss: found inf"),
        (edited(patterns={"1/4": "FFFSSSSS"}), "patterns.1/4: found 3 F layers, expected 2 of 8"),
        (edited(patterns={"x": "FFFSSSSS"}), "retention is 'x'"),
        (edited(created="yesterday"), "created: found 'yesterday'"),
        (edited(calibration__sources="sft.jsonl"), "calibration.sources: found 'sft.jsonl'"),
        (edited(calibration__sketch="AABy9"), "calibration.sketch: found 'AABy9'"),  # cut off
        (edited(trajectory__0__stderr=-1.0), "trajectory[0].stderr: found -1.0"),
    ],
)
def test_every_mistake_has_its_line(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    content = good()
    edit(content)
    assert message in refused(yaml.safe_dump(content))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found NoneType, expected a mapping"),
        ("- a\n", "found list, expected a mapping"),
        ("FSSS", "found str"),
        ("a: [", "line 1: not YAML"),
        ("a: b: c", "line 1: not YAML"),
        ("\tx: 1", "line 1: character U+0009 is not allowed"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("a: 1\n".encode("utf-16"), "not UTF-8, but UTF-16; expected UTF-8"),
        ("a: 1\n".encode("utf-16-be"), "not UTF-8, but UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer"),
        (b"\n<!DOCTYPE html>\n<title>Sign in</title>", "is a web page (Sign in)"),
        ("a: 1\nb: \ufeff2\n", "line 2: character U+FEFF is not allowed"),
        (b"\xef\xbb\xbf" * 2 + b"a: 1\n", "line 1: character U+FEFF is not allowed"),
        ("# a comment\u2028schema: hidden\n", "line 1: character U+2028 is not allowed"),
        ("# a comment\x85schema: hidden\n", "line 1: character U+0085 is not allowed"),
        ("a: b\rc: d\n", "line 1: character U+000D is not allowed"),
        ("# \u202egnirts\n", "line 1: character U+202E is not allowed"),
        ("x: 'a'# no comment\n", "line 1: something follows a closing quote"),
        ("x: {?a: 1}\n", "line 1: keys with ? are not allowed"),
        ("? x\n: 1\n", "line 1: keys with ? are not allowed"),
        ("x: 010\n", "line 1: number 010 begins with 0"),
        ("x: |\n  text\n", "line 1: a value of several lines"),
        ("x: [a,\n  b]\n", "line 1: brackets of several lines"),
        ("%YAML 1.1\n---\nx: 1\n", "directives are not allowed"),
        ("x: !!bool y\n", "line 1: tags are not allowed"),
        ("!!str {=: FFFF, comment: X}\n", "line 1: tags are not allowed"),
        ("schema: &a indexcache/v1\nmodel: *a\n", "line 1: anchors and aliases are not allowed"),
        ("pattern: FS\npattern: FF\n", "line 2: key 'pattern' stands there twice"),
        ("schema: !!python/object:os.system x\n", "tags are not allowed"),
        ("1: 2\n", "keys must be words"),
        ("[a]: 2\n", "keys must be words"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("---\na: 1\n---\nb: 2\n", "a second document is not allowed"),
        ("x" * (1 << 21), "expected at most"),
        ("seed: " + "9" * 5000, "has 5000 characters, expected at most 40"),
        ("seed: 0x" + "f" * 5000, "has 5002 characters, expected at most 40"),
        ("a\x1b[31m: 1\n", "character U+001B"),
        ('"a\\e[31m\\n": 1\n' + GOOD, "a\\u001b[31m : unknown key"),
        ("a: 0x\nb: 1:99:99\n" + GOOD, "a: unknown key"),
    ],
)
def test_other_text_is_refused_in_one_line(text: str | bytes, message: str) -> None:
    line = refused(text)
    assert message in line


def test_a_byte_order_mark_may_begin_a_file() -> None:
    """Editors on Windows, and what `kubectl create configmap --from-file` takes over from them, have one."""
    assert PatternFile.loads(b"\xef\xbb\xbf" + GOOD.encode()) == PatternFile.loads(GOOD)
    windows = GOOD.replace("\n", "\r\n")
    assert PatternFile.loads(b"\xef\xbb\xbf" + windows.encode()) == PatternFile.loads(GOOD)


def mutate(text: str, draw: random.Random) -> bytes:
    """One to three random edits of the kinds that hands, merges and disks make."""
    data = bytearray(text.encode())
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data))
        kind = draw.randrange(8)
        if kind == 0:
            data[at] = draw.randrange(256)
        elif kind == 1:
            del data[at : at + draw.randint(1, 30)]
        elif kind == 2:
            data[at:at] = draw.choice(
                [b"FS", b"\n", b"  ", b": ", b"- ", b"{", b"]", b"'", b"&a ", b"*a", b"!!x ", b"\x00"]
            )
        elif kind == 3:
            lines = bytes(data).split(b"\n")
            one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
            lines[one], lines[other] = lines[other], lines[one]
            data = bytearray(b"\n".join(lines))
        elif kind == 4:
            lines = bytes(data).split(b"\n")
            lines.insert(draw.randrange(len(lines)), draw.choice(lines))
            data = bytearray(b"\n".join(lines))
        elif kind == 5:
            swap = draw.choice([(b"F", b"S"), (b"S", b"F"), (b"0", b"1"), (b"8", b"7"), (b":", b""), (b" ", b"\t")])
            data = bytearray(bytes(data).replace(*swap, draw.randint(1, 2)))
        elif kind == 6:
            data = data[: max(1, at)]
        else:
            lines = bytes(data).split(b"\n")
            index = draw.randrange(len(lines))
            value = draw.choice([b"null", b"[]", b"{}", b"-1", b"1e999", b".nan", b"true", b"2026-99-99", b"~", b"0o9"])
            lines[index] = lines[index].split(b":")[0] + b": " + value
            data = bytearray(b"\n".join(lines))
    return bytes(data)


def test_a_thousand_damaged_files_are_refused_or_mean_something_valid() -> None:
    draw, accepted, base = random.Random(2026), 0, PatternFile.loads(GOOD)
    for _ in range(1000):
        data = mutate(base.dumps(), draw)
        try:
            file = PatternFile.loads(data, "deploy.yaml")
        except PatternFileError as error:
            assert str(error).startswith("deploy.yaml: ") and "\n" not in str(error)
            continue
        accepted += 1
        # What is accepted is a whole, consistent file; and only an edit of all that depends on it moves the pattern.
        assert PatternFile.loads(file.dumps()) == file
        file.as_pattern().check_fits(file.model.num_layers, file.model.locked_layers)
        if file.trajectory == base.trajectory and file.model == base.model:
            assert file.pattern == base.pattern
    assert 20 < accepted < 500


def test_the_exported_schema_is_current() -> None:
    path = Path(__file__).parents[2] / "sglang_indexcache" / "pattern_file.schema.json"
    assert json.loads(path.read_text()) == PatternFile.json_schema(), "run scripts/tools/export_schema.py"


def test_check_model_names_the_difference() -> None:
    config = tiny_config(num_hidden_layers=8, indexer_types=["full"] * 6 + ["shared", "full"])
    model = describe(config, "glm")
    content = good()
    content["model"]["config_sha256"] = model.config_sha256
    PatternFile.loads(yaml.safe_dump(content)).model.check(model)
    for field, value in (("config_sha256", "0" * 64), ("architecture", "DeepseekV32ForCausalLM")):
        changed = good()
        changed["model"] = {**content["model"], field: value}
        with pytest.raises(PatternFileError, match=rf"model\.{field}: file has .*, glm has"):
            PatternFile.loads(yaml.safe_dump(changed)).model.check(model)
