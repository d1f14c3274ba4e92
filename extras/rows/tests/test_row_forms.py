"""Forms that other tools write: words for roles, the Responses API, questions with answers, SGLang's request log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extras.rows.tests.test_rows import CALL, TOOL, turns
from extras.rows.tests.test_rows import CALLED as _CALLED
from indexcache_rows.chats import Chat
from indexcache_search.data.folders import data_files
from indexcache_search.data.formats import records
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.shapes import Section, Text, shape_of
from indexcache_search.data.sources import rows
from indexcache_search.errors import DataError, RowError

QUESTION, ANSWER = turns("How?", "So.")
CALLED: dict[str, Any] = _CALLED
FUNCTION: dict[str, Any] = {**TOOL}


def chat(row: dict[str, Any]) -> Chat:
    found = shape_of(row).read(row)
    assert isinstance(found, Chat)
    return found


@pytest.mark.parametrize(
    ("word", "role"),
    [
        *[(word, "user") for word in ("User", "USER", "human", "Human", "prompter")],
        *[(word, "assistant") for word in ("Assistant", "bot", "GPT", "chatbot", "model", "ai")],
        *[(word, "tool") for word in ("tool_response", "tool-result", "Tool Response", "ipython", "tool_output")],
        *[(word, "tool") for word in ("function", "observation", "function_response", "function_call_output")],
    ],
)
def test_words_for_roles(word: str, role: str) -> None:
    for row in ({"messages": [{"role": word, "content": "a"}]}, {"conversations": [{"from": word, "value": "a"}]}):
        assert chat(row).messages == ({"role": role, "content": "a"},)


@pytest.mark.parametrize("word", ["tool_call", "function_call", "function-call", "tool_calls"])
@pytest.mark.parametrize("call", [json.dumps(CALL), CALL, [CALL]], ids=["text", "object", "list"])
def test_a_call_is_a_turn_of_the_assistant(word: str, call: Any) -> None:
    """What the assistant said before it, and other calls, belong to the same turn, as Swift reads them."""
    [message] = chat({"messages": [{"role": word, "content": call}]}).messages
    assert message == CALLED
    said = [QUESTION, {"role": "assistant", "content": "I look."}, *[{"role": word, "content": call}] * 2]
    _, message, answer = chat({"messages": [*said, {"role": "tool_response", "content": "3"}]}).messages
    assert message == {"role": "assistant", "content": "I look.", "tool_calls": CALLED["tool_calls"] * 2}
    assert answer == {"role": "tool", "content": "3"}


def test_thoughts_belong_to_the_turn_behind_them() -> None:
    found = chat({"messages": [QUESTION, {"role": "reasoning", "content": "Hm."}, ANSWER, ANSWER]}).messages
    assert found == (QUESTION, {**ANSWER, "reasoning_content": "Hm."}, ANSWER)


ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "How?"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"q": "x"}'},
    {"type": "function_call_output", "call_id": "c", "output": "3"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
]
FLAT = {"type": "function", **FUNCTION["function"]}


@pytest.mark.parametrize(
    "row",
    [
        {"input": ITEMS[:1], "output": ITEMS[1:], "tools": [FLAT]},
        {"custom_id": "1", "body": {"input": ITEMS, "tools": [{"type": "web_search"}, FLAT]}},
        {"messages": ITEMS, "tools": [TOOL]},
    ],
    ids=["row", "batch", "messages"],
)
def test_items_of_the_responses_api(row: dict[str, Any]) -> None:
    found = chat(row)
    user, calls, result, answer = found.messages
    assert user == QUESTION and answer["role"] == "assistant" and answer["content"] == "So."
    assert calls["reasoning_content"] == "Hm." and calls["tool_calls"] == [{"id": "c", **CALLED["tool_calls"][0]}]
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "3", "c")
    assert found.tools == (TOOL,)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (
            {"body": {"input": "How?", "instructions": "Be brief."}},
            [{"role": "system", "content": "Be brief."}, QUESTION],
        ),
        ({"input": [QUESTION], "output": "So.", "system_prompt": "Be brief."}, 3),
        ({"prompt": [QUESTION], "response": "So."}, [QUESTION, ANSWER]),
        ({"prompt": [QUESTION], "response": [ANSWER]}, [QUESTION, ANSWER]),
        ({"prompt": "How?", "response": [ANSWER]}, [QUESTION, ANSWER]),
        ({"question": [QUESTION], "answer": ["So.", "Thus."]}, [QUESTION, ANSWER]),
        ({"prompt": json.dumps([QUESTION]), "response": "So."}, [QUESTION, ANSWER]),
        ({"input": json.dumps([QUESTION], indent=1), "output": json.dumps([ANSWER])}, [QUESTION, ANSWER]),
        ({"prompt": json.dumps([QUESTION]), "completion": json.dumps([ANSWER])}, [QUESTION, ANSWER]),
        ({"prompt": json.dumps([QUESTION]), "chosen": json.dumps([ANSWER])}, [QUESTION, ANSWER]),
        ({"prompt": '[{"a": 1}]', "response": "So."}, turns('[{"a": 1}]', "So.")),
        ({"problem": "How?", "solution": "So.", "answer": "7"}, [QUESTION, ANSWER]),
        ({"problem": "How?", "generated_solution": "So.", "expected_answer": "7"}, [QUESTION, ANSWER]),
        ({"problem": "How?", "answer": "So."}, [QUESTION, ANSWER]),
        ({"question": "How?", "solution": "So."}, [QUESTION, ANSWER]),
        ({"question": "How?", "answer": "So.", "solution": "No."}, [QUESTION, ANSWER]),
        ({"question": "How?", "answer": {"value": "So.", "aliases": ["Thus."]}}, [QUESTION, ANSWER]),
        ({"question": "How?", "answers": {"text": ["So.", "Thus."], "answer_start": [1, 2]}}, [QUESTION, ANSWER]),
        ({"question": "How?", "answers": [{"text": "So.", "answer_start": 1}]}, [QUESTION, ANSWER]),
        ({"context": "Long.", "question": "How?", "answers": {"text": ["So."]}}, turns("Long.\n\nHow?", "So.")),
        ({"context": "Long.", "question": "How?", "answers": {"text": [], "answer_start": []}}, turns("Long.\n\nHow?")),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_questions_with_answers(row: dict[str, Any], messages: Any) -> None:
    found = list(chat(row).messages)
    assert found[1:] == [QUESTION, ANSWER] if messages == 3 else found == messages


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": 7, "answer": "b"}, "query is int"),
        ({"query": "a", "answers": [7]}, r"answers\[0\] is int"),
        ({"question": "a", "answer": {"value": 7}}, r"answer.value is int"),
        ({"problem": "a", "generated_solution": 7}, "generated_solution is int"),
        ({"instruction": "a", "response": 7}, "response is int"),
        ({"instruction": "a", "response": "b", "context": 7}, "context is int"),
        ({"content": 7}, "content is int"),
        ({"conversations": []}, "conversations is empty"),
        ({"conversations": [{"from": "human", "value": 7}]}, r"conversations\[0\].value is int"),
        ({"conversations": [{"from": "human", "value": None}]}, r"conversations\[0\].value is null"),
        ({"conversations": [{"from": "elf", "value": "a"}]}, r"conversations\[0\]: from is 'elf'"),
        ({"messages": [{"role": "assistant", "content": "a", "thinking": 7}]}, r"messages\[0\].thinking is int"),
        ({"messages": turns("a"), "functions": "look"}, "functions is a string that is not JSON"),
        ({"messages": turns("a"), "system_prompt": 7}, "system_prompt is int"),
        (
            {"conversation": [{"role": "system", "content": "a"}], "system_prompt": "b"},
            r"system_prompt and conversation\[0\] are two",
        ),
        ({"prompt": turns("a"), "completion": [{"role": "assistant"}]}, r"completion\[0\].content is missing"),
        ({"input": turns("a"), "output": [7]}, r"output\[0\] is int"),
        ({"input": [{"type": "web_search_call"}], "output": "a"}, r"input\[0\] is of type web_search_call, expected"),
        ({"body": {"input": 7}}, "body.input is int, expected a string or a list of messages"),
    ],
)
def test_messages_name_the_columns_of_the_user(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=rf"^{message}"):
        shape_of(row).read(row)


# -- SGLang's log

STAMP = "[2026-11-29 04:00:00] "
SENT: dict[str, Any] = {"rid": "g0", "text": "a \"quoted, out={' text", "input_ids": [5, 6, 7], "log_metrics": True}
OUT = {"text": "it's", "output_ids": [8, 9], "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 3}}
OTHERS = (
    f"{STAMP}INFO: Uvicorn running",
    '{"level": "info"}',
    f"{STAMP}{json.dumps({'timestamp': 't', 'event': 'request.received', 'rid': 'g0', 'obj': SENT})}",
)


def as_json(sent: Any = SENT, out: Any = OUT) -> str:
    return json.dumps({"timestamp": "t", "event": "request.finished", "rid": "g0", "obj": sent, "out": out})


def as_text(sent: dict[str, Any] = SENT, out: Any = OUT) -> str:
    """A line as SGLang's default format writes it."""
    fields = ", ".join(f"{name}={value!r}" for name, value in sent.items())
    return f"Finish: obj=GenerateReqInput({fields}, lora_path=None), out={out!r}"


@pytest.mark.parametrize("form", [as_json, as_text], ids=["json", "text"])
@pytest.mark.parametrize("name", ["h_0.log", "h_0.log.2026-11-29_04", "requests.jsonl", "docker.log"])
def test_a_request_log(tmp_path: Path, form: Any, name: str) -> None:
    """Of finished requests the ids are read; health checks, aborted requests and lines of the server are none."""
    check = {**SENT, "log_metrics": False}
    aborted = {**OUT, "meta_info": {"finish_reason": {"type": "abort", "message": "it's {gone}"}}}
    lines = [STAMP + line for line in (form(), form(check), form(SENT, aborted), form())]
    lines[2:2] = OTHERS
    if name == "docker.log":
        lines = [json.dumps({"log": line + "\n", "stream": "stderr"}) for line in lines]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    found = [shape_of(row).read(row) for _, row in records(tmp_path / name) if not isinstance(row, RowError)]
    assert len(found) == 2
    for section in found:
        assert isinstance(section, Section) and section.written
        assert section.tokens.tolist() == [5, 6, 7, 8, 9] and section.mask.tolist() == [False] * 3 + [True] * 2
    for replies, counted in ((True, 4), (False, 10)):
        reader = TokenReader(lambda: None, 10, 8, replies)
        assert list(reader.documents(str(tmp_path / name), 0))
        assert reader.readings[0].counted == counted
    [file] = data_files(tmp_path, lambda note: None)
    assert file.name == name


@pytest.mark.parametrize("form", [as_json, as_text], ids=["json", "text"])
def test_requests_that_are_not_whole(tmp_path: Path, form: Any) -> None:
    """Level 2 cuts long ones, level 1 leaves text and ids out; images have other ids than tokens."""

    def read(sent: Any, out: Any) -> Any:
        (tmp_path / "h.log").write_text(form(sent, out) + "\n")
        [(_, row)] = records(tmp_path / "h.log")
        assert not isinstance(row, RowError)
        return shape_of(row).read(row)

    assert read({**SENT, "input_ids": None}, {"text": "it's"}) == Text.of(SENT["text"], "it's")
    with pytest.raises(RowError, match="its log has no prompt or no reply, expected --log-requests-level 3"):
        read({"rid": "g0"}, {"meta_info": {}})
    with pytest.raises(RowError, match=r"obj.input_ids has 3 entries, but prompt_tokens is 900: not all are there"):
        read(SENT, {**OUT, "meta_info": {"prompt_tokens": 900}})


def test_a_log_that_is_cut(tmp_path: Path) -> None:
    ids, text = list(range(4)), "x" * 1024
    cut = as_text().replace("[5, 6, 7]", f"{ids} ... {ids}")
    whole = as_text({**SENT, "input_ids": None}).replace(repr(SENT["text"]), f"{text!r} ... {text!r}")
    as_lists = as_json({**SENT, "input_ids": [*ids, "...", *ids]})
    as_texts = as_json({"text": f"{text}...{text}"}, {"text": "b"})
    for line in (cut, whole.replace("'output_ids'", "'ids'"), as_lists, as_texts):
        (tmp_path / "h.log").write_text(line)
        [(_, row)] = records(tmp_path / "h.log")
        assert not isinstance(row, RowError)
        with pytest.raises(RowError, match="its log is cut, expected --log-requests-level 3"):
            shape_of(row).read(row)


def test_files_that_are_no_log_of_requests(tmp_path: Path) -> None:
    (tmp_path / "h.log").write_text("\n".join(OTHERS))
    with pytest.raises(DataError, match=r"h.log: has no finished request, expected SGLang's log with --log-requests"):
        list(records(tmp_path / "h.log"))
    (tmp_path / "dump.pkl").write_bytes(b"\x80\x04.")
    with pytest.raises(DataError, match=r"dump.pkl: is a pickle, which may run code; expected SGLang's log with"):
        list(rows(str(tmp_path / "dump.pkl"), 0))


def test_a_log_beside_a_table_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "train.log").write_text("step 1\n")
    assert [file.name for file in data_files(tmp_path, lambda note: None)] == ["train.jsonl"]


def test_requests_of_a_client(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "output_ids": [7]}
    found = shape_of(row).read(row)
    assert isinstance(found, Section) and found.tokens.tolist() == [5, 6, 7]
    assert found.mask.tolist() == [False, False, True] and found.written
