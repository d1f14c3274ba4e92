"""SGLang's request log: one reader for a search's data and for a watch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import indexcache_rows
import indexcache_search
from indexcache_search.data.reader import TokenReader
from indexcache_search.errors import DataError
from indexcache_watch.requests import RequestLog

STAMP = "[2026-11-29 04:00:00] "


def line(prompt: Any, reply: Any, end: Any = None, **sent: Any) -> str:
    """A line of SGLang's JSON log."""
    out = {"text": "it's", "output_ids": reply, "meta_info": {"finish_reason": end or {"type": "stop", "matched": 2}}}
    content = {"timestamp": "t", "event": "request.finished", "rid": "g0"}
    return STAMP + json.dumps({**content, "obj": {"text": None, "input_ids": prompt, **sent}, "out": out}) + "\n"


def as_text(prompt: Any, reply: Any, end: Any = None, **sent: Any) -> str:
    """The same line as SGLang writes it by default."""
    fields = {"rid": "g0", "text": None, "input_ids": prompt, "image_data": None, "lora_path": None, **sent}
    obj = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    out = {"text": "it's", "output_ids": reply, "meta_info": {"finish_reason": end or {"type": "stop", "matched": 2}}}
    return f"{STAMP}Finish: obj=GenerateReqInput({obj}), out={out!r}\n"


def data(source: Path) -> tuple[list[list[int]], list[str]]:
    """What a search reads of a source: tokens, and its notes."""
    reader = TokenReader(lambda: None, 100, 8)
    documents = [section.tokens.tolist() for [section] in reader.documents(str(source), 0, "calibration")]
    return sorted(documents), [note.removeprefix(f"{source}: ") for note in reader.notes]


def watched(source: Path) -> tuple[list[list[int]], dict[str, int]]:
    log = RequestLog(source)
    return sorted(request.tokens.tolist() for request in log.new()), dict(log.skipped)


PREFILL = {"type": "length", "length": 0}
LEFT_OUT = [
    ({"image_data": ["data:image/png;base64,'AA"]}, None, "it has images, video or audio"),
    ({"audio_data": "https://a"}, None, "it has images, video or audio"),
    ({"input_embeds": [[0.1]]}, None, "its prompt is embeddings, not tokens"),
    (
        {"bootstrap_room": 7},
        PREFILL,
        "a prefill server logged it, which writes one token: expected the decode server's log",
    ),
]


@pytest.mark.parametrize(("sent", "end", "reason"), LEFT_OUT, ids=["image", "audio", "embeddings", "prefill"])
@pytest.mark.parametrize("form", [line, as_text], ids=["json", "text"])
def test_what_tokens_alone_do_not_say_is_left_out_of_both(
    tmp_path: Path, form: Any, sent: dict[str, Any], end: Any, reason: str
) -> None:
    """A search read the places that stand for an image as tokens, and a prefill server's half as a request."""
    (tmp_path / "h.log").write_text(form([5, 6], [7], end, **sent) + form([1, 2], [3]))
    assert data(tmp_path) == ([[1, 2, 3]], [f"1 calibration rows are left out: {reason}"])
    if form is line:  # a watch takes JSON alone
        assert watched(tmp_path) == ([[1, 2, 3]], {reason: 1})


def test_a_batch_is_left_out_of_both(tmp_path: Path) -> None:
    (tmp_path / "h.log").write_text(line([[5], [6]], [7]) + line([1, 2], [3]))
    reason = "it is several requests at once"
    assert data(tmp_path) == ([[1, 2, 3]], [f"1 calibration rows are left out: {reason}"])
    assert watched(tmp_path) == ([[1, 2, 3]], {reason: 1})


def test_what_an_adapter_wrote_is_text_and_no_request_to_score(tmp_path: Path) -> None:
    """A search reads any text; two servers without the adapter would score what neither wrote."""
    (tmp_path / "h.log").write_text(line([5, 6], [7], lora_path="own") + line([1, 2], [3]))
    assert data(tmp_path) == ([[1, 2, 3], [5, 6, 7]], [])
    assert watched(tmp_path) == ([[1, 2, 3]], {"a LoRA adapter wrote its reply: own": 1})


def test_logs_of_two_servers_with_those_that_were_rotated(tmp_path: Path) -> None:
    """A search knew neither logrotate's names nor those of compressed logs, and ended at a log just begun."""
    names = ["a_0.log.2026-11-29_04", "a_0.log.1", "b_0.log-20261128", "b_0.log.2.gz", "b_0.log", "c.jsonl.1"]
    for number, name in enumerate(names):
        content = line([number, 1], [2]).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (tmp_path / "a_0.log").write_text("")
    received = json.dumps({"timestamp": "t", "event": "request.received", "rid": "1", "obj": {"input_ids": [1]}})
    (tmp_path / "d_0.log").write_text(f"{STAMP}{received}\n")
    logs = [tmp_path / name for name in names[:-1]]
    expected = [[number, 1, 2] for number in range(len(names))]
    assert watched(tmp_path) == (expected, {})
    (tmp_path / names[-1]).unlink()  # lines of JSON beside logs are another kind of data
    found, notes = data(tmp_path)
    none = [f"{tmp_path / name} is not read: it has no finished request" for name in ("a_0.log", "d_0.log")]
    assert (found, sorted(notes)) == (expected[:-1], none)
    for log, tokens in zip(logs, expected, strict=False):
        assert data(log) == ([tokens], []), log


def test_a_folder_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a_0.log").write_text("")
    (tmp_path / "a_0.log.1").write_text(f"{STAMP}INFO\n")
    with pytest.raises(
        DataError, match=r"a_0\.log.* has no finished request, expected SGLang's log with --log-requests"
    ):
        data(tmp_path)


def test_a_last_line_that_is_being_written_is_no_mistake(tmp_path: Path) -> None:
    """One that a restart left in the middle is: what stands there is lost."""
    torn = line([1] * 9, [2])[:90]
    (tmp_path / "h.log").write_text(line([1, 2], [3]) + torn)
    assert data(tmp_path)[0] == watched(tmp_path)[0] == [[1, 2, 3]]
    (tmp_path / "h.log").write_text(line([1, 2], [3]) + torn + line([4, 5], [6]))
    with pytest.raises(DataError, match=r"h\.log: line 2: not JSON; a line of SGLang's log that does not end"):
        data(tmp_path)
    with pytest.raises(DataError, match=r"h\.log: line 2: not JSON"):
        watched(tmp_path)


def test_a_decode_servers_request_is_read_once_beside_its_prefill_servers(tmp_path: Path) -> None:
    (tmp_path / "prefill_0.log").write_text(line([1, 2], [3], PREFILL, bootstrap_room=0))
    (tmp_path / "decode_0.log").write_text(line([1, 2], [3, 4], bootstrap_room=0))
    assert data(tmp_path)[0] == watched(tmp_path)[0] == [[1, 2, 3, 4]]


def test_a_list_of_requests_is_a_log_for_both(tmp_path: Path) -> None:
    rows = [json.loads(line([1, 2], [3]).removeprefix(STAMP))]
    (tmp_path / "a.json").write_text(json.dumps([{name: rows[0][name] for name in ("obj", "out")}]))
    assert data(tmp_path)[0] == watched(tmp_path)[0] == [[1, 2, 3]]


def test_one_module_knows_what_the_log_says() -> None:
    """Two that did so told batches, images and halves apart each in its own way."""
    packages = [Path(item.__file__).parent for item in (indexcache_search, indexcache_rows)]
    words = ("request.finished", "bootstrap_room", "finish_reason", "prompt_token_ids", "lora_path")
    files = [path for package in packages for path in package.rglob("*.py")]
    knowing = [path for path in files if any(f'"{word}"' in path.read_text() for word in words)]
    assert [path.relative_to(packages[1]).as_posix() for path in knowing] == ["request_log.py"]
