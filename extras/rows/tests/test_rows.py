"""Rows as people store them: which columns are read, what a chat template is given, and whose tokens count."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from indexcache_rows.chats import Chat
from indexcache_search import demo
from indexcache_search.data import templates
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.shapes import Section, Text, shape_of
from indexcache_search.data.templates import RowOptions, read_template
from indexcache_search.errors import DataError, RowError
from indexcache_tasks.tasks import sample

TEMPLATE = (
    "{% for t in tools or [] %}<tool {{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = (  # thoughts before the last question, as Qwen3's
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set ns.last = loop.index %}"
    "{% endfor %}{% set ns.seen = 0 %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.seen = ns.seen + 1 %}"
    "{% endif %}<{{ m.role }}>{% if m.role == 'assistant' and ns.seen == ns.last %}(so){% endif %}{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKS_FOR_THOUGHTS = TEMPLATE.replace("<assistant>{% endif %}", "<assistant>(so){% endif %}")


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.MODEL)


def fresh_tokenizer() -> Any:
    """A tokenizer, with no template of another test."""
    tokenizer().chat_template = None
    return tokenizer()


def said(row: dict[str, Any]) -> Section | Text | Chat:
    return shape_of(row).read(row)


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def texts_of(row: dict[str, Any], tmp_path: Path, **options: Any) -> list[tuple[str, str]]:
    """The texts of a row and what of them counts, decoded from tokens."""
    path = tmp_path / "row.json"
    path.write_text(json.dumps([row]))
    options.setdefault("chat_template", TEMPLATE)
    reader = TokenReader(fresh_tokenizer, tokenizer().vocab_size, 512, replies=True, options=RowOptions(**options))
    return [
        (tokenizer().decode(section.tokens.tolist()), tokenizer().decode(section.tokens[section.mask].tolist()))
        for [section] in reader.documents(str(path), 0)
    ]


TALK = Chat(tuple(turns("How?", "So.")))
CALL = {"name": "look", "arguments": {"q": "x"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": turns("How?", "So.")}, TALK),
        ({"messages": json.dumps(turns("How?", "So.")), "text": "So it is."}, TALK),
        ({"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}], "id": 7}, TALK),
        ({"conversations": turns("How?", "So."), "messages": None}, TALK),
        ({"conversations": turns("How?", "So."), "messages": turns("How?", "So.")}, TALK),
        ({"body": {"model": "m", "messages": turns("How?", "So.")}, "custom_id": "1", "method": "POST"}, TALK),
        ({"chosen": turns("How?", "So."), "rejected": turns("How?", "No."), "prompt": "How?"}, TALK),
        ({"chosen": turns("How?", "So.")[1:], "rejected": [], "prompt": turns("How?")}, TALK),
        ({"prompt": turns("How?"), "completion": turns("How?", "So.")[1:]}, TALK),
        ({"prompt": turns("How?"), "completion": "So."}, TALK),
        ({"instruction": "How?", "input": "", "output": "So."}, TALK),
        ({"question": "How?", "answer": "So.", "source": "a"}, TALK),
        ({"prompt": "How?", "response": "So.", "completion": None}, TALK),
        ({"input": "How?", "output": "So."}, TALK),
        (
            {"context": "Long.", "input": "How?", "answers": ["So.", "Thus."]},
            Chat(tuple(turns("Long.\n\nHow?", "So."))),
        ),
        ({"instruction": "How?", "context": "Long.", "response": "So."}, Chat(tuple(turns("How?\n\nLong.", "So.")))),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
            Chat((turns("a b")[0],)),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Look."},
                    {"from": "function_call", "value": json.dumps(CALL)},
                ]
            },
            Chat((turns("Look.")[0], CALLED)),
        ),
        (
            {"conversations": turns("Look."), "system": "Be brief.", "tools": json.dumps([TOOL["function"]])},
            Chat(({"role": "system", "content": "Be brief."}, turns("Look.")[0]), (TOOL,)),
        ),
        (
            {"messages": [{"role": "system", "content": "", "tools": [TOOL]}], "tools": [TOOL]},
            Chat(({"role": "system", "content": ""},), (TOOL,)),
        ),
        ({"text": "Word.", "messages": None, "url": "u"}, Text.of("", "Word.")),
        ({"content": "Word."}, Text.of("", "Word.")),
        ({"prompt": "How? ", "completion": "So."}, Text.of("How? ", "So.")),
        ({"prompt": "How? ", "chosen": "How? So.", "rejected": "No."}, Text.of("How? ", "So.")),
        ({"chosen": "How? So.", "rejected": "No."}, Text.of("", "How? So.")),
        ({"input": "Numbers:", "outputs": ["1", "2"], "index": 0}, Text.of("Numbers:", " 1, 2")),
        ({"input_ids": [4, 5], "labels": [-100, 5]}, Section(np.array([4, 5]), np.array([False, True]))),
        (
            {"input_ids": [4, 5, 0], "attention_mask": [1, 1, 0], "loss_mask": [0, 1, 1]},
            Section(np.array([4, 5]), np.array([False, True])),
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else type(value).__name__,
)
def test_what_rows_say(row: dict[str, Any], expected: Section | Text | Chat) -> None:
    found = said(row)
    if isinstance(found, Chat) and isinstance(expected, Chat):
        assert (found.messages, found.tools) == (expected.messages, expected.tools)
    elif isinstance(found, Section) and isinstance(expected, Section):
        assert found.tokens.tolist() == expected.tokens.tolist() and found.mask.tolist() == expected.mask.tolist()
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages is a string that is not JSON, expected a list"),
        ({"messages": {"role": "user"}}, "messages is dict, expected a list"),
        ({"messages": ["hello"]}, r"messages\[0\] is str, expected an object with role and content"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: role is null, expected assistant, .*user or human"),
        ({"messages": [{"role": "Narrator", "content": "a"}]}, "role is 'Narrator', expected"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "role is list, expected"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content is null"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "content is null"),
        ({"messages": [{"role": "user", "content": 7}]}, "content is int, expected a string or a list of parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"\[0\] is of type image_url, only text",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, r"content\[0\] is str, expected an object"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "a"}]}, "role and .*from differ"),
        ({"messages": [{"role": "user", "content": "a", "value": "b"}]}, "content and .*value differ"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "user has tool_calls"),
        ({"messages": [{**CALLED, "tool_calls": [{"function": {**CALL, "arguments": "{"}}]}]}, "arguments is a string"),
        ({"messages": [{**CALLED, "tool_calls": [{"function": {**CALL, "arguments": "7"}}]}]}, "arguments is int"),
        ({"messages": [{**CALLED, "tool_calls": [{"id": 1}]}]}, r"tool_calls\[0\] names no function"),
        ({"messages": turns("a"), "tools": "look"}, "tools is a string that is not JSON"),
        ({"messages": turns("a"), "tools": [{"x": 1}]}, r"tools\[0\] names no function"),
        ({"messages": turns("a"), "conversations": turns("b")}, "messages and conversations differ"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "two system prompts"),
        ({"messages": turns("a"), "loss_mask": [1]}, "loss_mask stands beside messages"),
        ({"text": "a", "content": "b"}, "text and content differ"),
        ({"text": None}, "text is null"),
        ({"prompt": "a", "completion": None}, "completion is null"),
        ({"chosen": None, "rejected": "a"}, "chosen is null"),
        ({"prompt": "a", "completion": 7}, "completion is int, expected a string or a list"),
        ({"input": "a", "question": "b", "answer": "c"}, "question and input differ"),
        ({"question": "b", "answer": "c", "system": 7}, "system is int, expected a string"),
        ({"context": "a", "question": "b", "answers": {"start": [7]}}, "answers has start, expected text or value"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, r"history\[0\] is not a list of a question and its"),
        ({"custom_id": "1", "response": {"body": {"choices": []}}}, "an answer of a batch without its prompt"),
        ({"body": {"url": "a"}, "custom_id": "1"}, "body has url, expected messages, input or prompt"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries, input_ids 2; expected as many"),
        ({"input_ids": [1, 2], "labels": [-100, 1], "loss_mask": [1, 1]}, "loss_mask and labels differ"),
        ({"title": "a", "score": 1}, "columns are title, score, expected one of: input_ids; messages or conversations"),
        ({}, "columns are missing"),
    ],
)
def test_rows_that_are_broken(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        said(row)


def test_columns_that_are_not_read_are_known() -> None:
    row = {"messages": turns("a"), "text": "a", "id": 1, "meta": None, "tools": []}
    assert shape_of(row).unread(row) == ["text", "id"]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"input": "a", "output": "b"}, "input, output"),
        ({"prompt": None, "query": "a", "answer": "b"}, "query, answer"),
        ({"conversations": turns("a")}, "conversations"),
        ({"content": "a"}, "content"),
        ({"instruction": "a", "response": "b"}, "instruction, response"),
        ({"context": "a", "question": "b", "answers": ["c"]}, "context, question, answers"),
        ({"body": {"messages": turns("a")}}, "body (batch)"),
        ({"obj": {}, "out": {}}, "obj, out (SGLang's log)"),
    ],
)
def test_rows_are_named_by_the_columns_of_the_user(row: dict[str, Any], name: str) -> None:
    assert shape_of(row).named(row) == name


@pytest.mark.parametrize(
    ("row", "text", "counts"),
    [
        (
            {"messages": turns("How?", "So.", "Why?", "Thus.")},
            "<user>How?;<assistant>So.;<user>Why?;<assistant>Thus.;",
            "So.;Thus.;",
        ),
        (
            {"messages": [*turns("Hm.")[:1], {"role": "assistant", "content": "So.", "weight": 0}]},
            "<user>Hm.;<assistant>So.;",
            "",
        ),
        (
            {"messages": [turns("Look.")[0], {**CALLED, "thinking": "mm"}], "tools": [TOOL]},
            "<tool look><user>Look.;<assistant>(mm)[look q=x];",
            "(mm)[look q=x];",
        ),
        ({"prompt": "How? ", "completion": "So."}, "How? So.<|eos|>", " So.<|eos|>"),  # a token with the space
        ({"input": "How?", "output": "So."}, "<user>How?;<assistant>So.;", "So.;"),
    ],
)
def test_replies_count(tmp_path: Path, row: dict[str, Any], text: str, counts: str) -> None:
    end = tokenizer().decode([tokenizer().eos_token_id])
    assert texts_of(row, tmp_path) == [(text.replace("<|eos|>", end), counts.replace("<|eos|>", end))]


def test_pairs_need_no_template_and_conversations_do(tmp_path: Path) -> None:
    end = tokenizer().decode([tokenizer().eos_token_id])
    row = {"instruction": "How?", "input": "Long.", "output": "So.", "system": "Be brief."}
    assert texts_of(row, tmp_path, chat_template=None) == [(f"Be brief.\n\nHow?\n\nLong.\n\nSo.{end}", f"So.{end}")]
    with pytest.raises(
        DataError, match=r"row.json: row 1: .*no chat template; expected --rows chat_template=FILE"
    ) as caught:
        texts_of({"messages": turns("How?", "So.")}, tmp_path, chat_template=None)
    assert not isinstance(caught.value, RowError)  # no row is to blame, none is skipped


def test_earlier_turns_that_are_written_otherwise(tmp_path: Path) -> None:
    row = {"messages": turns("How?", "So.", "Why?", "Thus.")}
    first, second = "<user>How?;<assistant>(so)So.;", "<user>How?;<assistant>So.;<user>Why?;<assistant>(so)Thus.;"
    each = [(first + second, "(so)So.;(so)Thus.;")]
    assert texts_of(row, tmp_path, chat_template=FORGETS) == each
    assert texts_of(row, tmp_path, chat_template=FORGETS, turns="each") == each
    assert texts_of(row, tmp_path, chat_template=FORGETS, turns="last") == [(second, "(so)Thus.;")]
    with pytest.raises(DataError, match=r"row 1: .*otherwise once others follow.*expected --rows turns=each or last"):
        texts_of(row, tmp_path, chat_template=FORGETS, turns="all")
    assert texts_of(row, tmp_path, turns="each")[0][1] == "So.;Thus.;"  # also where nothing forces it


def test_prompts_may_ask_for_thoughts_that_the_data_lack(tmp_path: Path) -> None:
    row = {"messages": turns("How?", "So.")}
    assert texts_of(row, tmp_path, chat_template=ASKS_FOR_THOUGHTS) == [("<user>How?;<assistant>So.;", "So.;")]


def test_templates_that_take_other_forms(tmp_path: Path) -> None:
    """Arguments as strings, as DeepSeek-V3.1's template takes them."""
    template = "{% for m in messages if m.tool_calls %}{{ 'call ' + m.tool_calls[0].function.arguments }}{% endfor %}"
    row = {"messages": [turns("Look.")[0], CALLED]}
    assert texts_of(row, tmp_path, chat_template=template)[0][0] == 'call {"q": "x"}'


def test_what_a_template_leaves_out_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [turns("Look.")[0], {**CALLED, "reasoning": "mm"}], "tools": [TOOL]}))
    options = RowOptions(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    reader = TokenReader(fresh_tokenizer, tokenizer().vocab_size, 512, options=options)
    assert list(reader.documents(str(path), 0))
    assert reader.notes == tuple(f"{path}: the chat template leaves out {word}" for word in ("tools", "reasoning"))


def test_roles_that_a_template_leaves_out_are_said(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    first = [{"role": "developer", "content": "Be brief."}, {"role": "system", "content": 'Think "so".'}]
    path.write_text(json.dumps({"messages": [*first, *turns("Look.", "There."), {"role": "tool", "content": "late"}]}))
    template = "{% for m in messages if m.role != 'developer' %}{{ m.content | tojson }}{% endfor %}"
    for options in (RowOptions(chat_template=template), RowOptions(chat_template=template, turns="last")):
        reader = TokenReader(fresh_tokenizer, tokenizer().vocab_size, 512, options=options)
        assert list(reader.documents(str(path), 0))
        assert reader.notes == (f"{path}: the chat template leaves out messages of role developer",)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for a in range(9) %}{{ f(n + 1) if n < 30 }}{% endfor %}{% endmacro %}{{ f(0) }}",
    ],
    ids=["loops", "calls"],
)
def test_templates_that_do_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(templates, "RENDER_SECONDS", 0.1)
    with pytest.raises(DataError, match=r"row 1: the chat template takes more than 0.1 seconds") as caught:
        texts_of({"messages": turns("How?")}, tmp_path, chat_template=template)
    assert not isinstance(caught.value, RowError)
    looping = fresh_tokenizer()
    looping.chat_template = template
    with pytest.raises(DataError, match=r"--tasks chat=yes: .*takes more than 0.1 seconds"):
        sample("multi_key", looping, list(range(3, 90)) * 9, 256, 0, chat=True)


def test_files_of_templates(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(b"\xef\xbb\xbf" + TEMPLATE.encode())
    assert read_template(path) == TEMPLATE
    for content, message in ((b" \n", "is empty"), (b"\xff", "not UTF-8")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"chat.jinja.*{message}"):
            read_template(path)
    with pytest.raises(DataError, match="row 1: the chat template refuses it: "):
        texts_of({"messages": turns("How?")}, tmp_path, chat_template="{% for %}")


def test_bad_rows_are_named_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [
        json.dumps({"input_ids": [3, 4]}),
        "{",
        json.dumps({"input_ids": None}),
        "[]",
        json.dumps({"input_ids": [5]}),
    ]
    path.write_text("\n".join(lines))

    def of(most: int) -> TokenReader:
        reader = TokenReader(fresh_tokenizer, 9, 8, options=RowOptions(skip_bad_rows=most, chat_template=TEMPLATE))
        assert sorted(len(section.tokens) for [section] in reader.documents(str(path), 0)) == [1, 2]
        return reader

    reader = of(3)
    assert "--rows chat_template changed no row: none is a conversation" in reader.notes
    assert len(reader.readings[0].bad) == 3 and "and 2 more" in reader.notes[0]
    assert str(reader.readings[0]) == "rows read: 2, bad ones skipped: 3; tokens: 3, of which count: 3"
    with pytest.raises(DataError, match=r"line \d: .* \(2 bad rows were skipped before it\); --rows skip_bad=N skips"):
        of(2)


# -- a thousand mutations

SEEDS: list[dict[str, Any]] = [
    {"messages": turns("How?", "So.", "Why?", "Thus.")},
    {"messages": [turns("Look.")[0], CALLED, {"role": "tool", "content": "x", "tool_call_id": "c"}], "tools": [TOOL]},
    {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]},
    {"body": {"messages": turns("How?", "So.")}, "custom_id": "1"},
    {"prompt": turns("How?"), "chosen": turns("How?", "So."), "rejected": []},
    {"instruction": "How?", "input": "Long.", "output": "So.", "history": [["a", "b"]]},
]
ODD: list[Any] = [
    None,
    "",
    "a",
    0,
    -1,
    2.5,
    True,
    [],
    {},
    [[]],
    [{}],
    {"a": 1},
    "\ud800",
    "\x1b[2J",
    "{",
    float("nan"),
    "user",
]


def mutate(value: Any, rng: random.Random) -> Any:
    """`value` with one place in it changed: another value, another key, one less, one twice."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice(ODD)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return rng.choice(
            [[*value[:at], mutate(value[at], rng), *value[at + 1 :]], value[:at] + value[at + 1 :], [value[at], *value]]
        )
    key = rng.choice(list(value))
    rest = {name: item for name, item in value.items() if name != key}
    return rng.choice(
        [{**value, key: mutate(value[key], rng)}, rest, {**rest, rng.choice(["role", "from", "x"]): value[key]}]
    )


def whole(message: Any) -> bool:
    """Whether a message that was accepted is one that a template can be given."""
    return isinstance(message["content"], str) and message["role"] in (
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
    )


def test_a_thousand_mutated_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line or a right conversation."""
    rng, refused = random.Random(45), 0
    options = RowOptions(chat_template=TEMPLATE)
    reader = TokenReader(fresh_tokenizer, tokenizer().vocab_size, 64, replies=True, options=options)
    produced: list[dict[str, Any]] = []
    monkeypatch.setattr("indexcache_search.data.reader.rows", lambda *_: [(f"row {len(produced)}", produced[-1])])
    for number in range(1000):
        row = SEEDS[number % len(SEEDS)]
        for _ in range(rng.randint(1, 3)):
            row = mutate(row, rng)
            if not isinstance(row, dict):
                row = {"messages": row}
        produced.append(row)
        try:
            sections = [section for document in reader.documents("x", 0) for section in document]
        except DataError as error:
            refused += 1
            assert str(error).startswith(f"row {len(produced)}: ") and str(error).isprintable()
            continue
        assert sum(len(section.tokens) for section in sections)
        content = said(row)
        assert not isinstance(content, Chat) or (content.messages and all(map(whole, content.messages)))
    assert 400 < refused < 950


WRITERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "role": lambda message: {**message, "role": None},
    "content": lambda message: {"role": message["role"]},
}


@pytest.mark.parametrize("broken", WRITERS)
def test_no_place_of_a_chat_may_be_broken(broken: str) -> None:
    for at in range(4):
        messages: list[dict[str, Any]] = list(turns("How?", "So.", "Why?", "Thus."))
        messages[at] = WRITERS[broken](messages[at])
        with pytest.raises(RowError, match=rf"messages\[{at}\]"):
            said({"messages": messages})
