"""The warm-up prompt that selects: sent before SGLang's own, to a server on this machine, whatever goes wrong."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("requests")

from sglang_indexcache.serving import engines, warm_up
from tests.http_stub import Answering, HttpStub


class Answers(Answering):
    said: dict[str, Any]
    asked: list[tuple[str, Any, str | None]]

    def get(self) -> None:
        self.answer()

    def post(self, body: Any) -> None:
        self.asked.append((self.path, body, self.headers["Authorization"]))
        self.answer()

    def answer(self) -> None:
        content = self.said.get(self.path)
        self.reply(content, 400 if content is None else 200)


@pytest.fixture
def server() -> Iterator[Any]:
    said = {"/model_info": {"is_generation": True}, "/server_info": {"max_req_input_len": 4000}, "/generate": {}}
    handler = type("Handler", (Answers,), {"said": said, "asked": []})
    found = HttpStub(handler)
    yield SimpleNamespace(
        asked=handler.asked,  # type: ignore[attr-defined]
        said=said,
        args=SimpleNamespace(url=lambda: found.url, api_key=None, ssl_ca_certs=None, ssl_certfile=None),
    )
    found.close()


def test_the_prompt_is_longer_than_a_selection_and_comes_first(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server.args.api_key = "secret"
    before: list[int] = []
    assert warm_up.run(2048, lambda args: before.append(len(server.asked)) is None, server.args)
    [(path, body, key)] = server.asked
    assert before == [1] and path == "/generate" and key == "Bearer secret"
    assert len(body["input_ids"]) == 2048 + 128 and body["sampling_params"]["max_new_tokens"] == 8
    assert not warm_up.run(2048, lambda args: False, server.args)  # what SGLang's own says counts


def test_it_fits_into_the_context(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.said["/server_info"]["max_req_input_len"] = 2100
    warm_up.run(2048, lambda args: True, server.args)
    assert len(server.asked[0][1]["input_ids"]) == 2092
    server.said["/server_info"]["max_req_input_len"] = 2056
    warm_up.run(2048, lambda args: True, server.args)
    assert len(server.asked) == 1 and "one has at most 2048 tokens, a selection 2048" in caplog.text


@pytest.mark.parametrize("sizes", [{"dp_size": 3}, {"dp_size": 1, "attn_dp_size": 3}], ids=["replicas", "attention"])
def test_every_data_parallel_rank_gets_one(server: Any, sizes: dict[str, int]) -> None:
    vars(server.args).update(sizes)
    warm_up.run(10, lambda args: True, server.args)
    prompts = server.asked[0][1]["input_ids"]
    assert len(prompts) == 3 and {len(prompt) for prompt in prompts} == {138}
    assert len({tuple(prompt) for prompt in prompts}) == 3  # none is in a cache already


def test_prefill_servers_hand_over_to_nobody_and_decode_servers_read_no_prompts(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = ModuleType("sglang.srt.disaggregation.utils")
    utils.FAKE_BOOTSTRAP_HOST = "nobody"  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    server.args.disaggregation_mode, server.args.dp_size = "prefill", 2
    warm_up.run(10, lambda args: True, server.args)
    sent = [(body["bootstrap_host"], body["bootstrap_room"], body["routed_dp_rank"]) for _, body, _ in server.asked]
    assert sent == [("nobody", 0, 0), ("nobody", 1, 1)]
    server.args.disaggregation_mode = "decode"
    warm_up.run(10, lambda args: True, server.args)
    assert len(server.asked) == 2


@pytest.mark.parametrize("path", ["/generate", "/server_info", "/model_info"])
def test_a_server_that_answers_otherwise_is_a_warning(
    path: str, server: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "_TRIES", 2)
    monkeypatch.setattr(warm_up.time, "sleep", lambda seconds: None)
    server.said[path] = None
    with caplog.at_level(logging.WARNING):
        assert warm_up.run(10, lambda args: True, server.args)
    assert "no warm-up prompt that selects (400: null): the first long prompts are counted" in caplog.text


def test_embedding_models_get_none(server: Any) -> None:
    server.said["/model_info"] = {"is_generation": False}
    warm_up.run(10, lambda args: True, server.args)
    assert server.asked == []


@pytest.mark.parametrize(
    ("plan", "sends"),
    [
        (None, False),
        (SimpleNamespace(serves=False), False),
        (SimpleNamespace(serves=True, pattern=SimpleNamespace(dense=True, is_full=False)), False),
        (SimpleNamespace(serves=True, pattern=SimpleNamespace(dense=False, is_full=True)), False),
        (SimpleNamespace(serves=True, pattern=SimpleNamespace(dense=False, is_full=False), selects_after=64), True),
    ],
)
def test_only_servers_whose_indexers_are_counted_get_one(
    plan: Any, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "plan_of", lambda server_args: plan)

    def theirs(server_args: Any) -> bool:
        return True

    def wait_and_warmup(server_args: Any, launch_callback: Any = None, execute_warmup_func: Any = theirs) -> Any:
        return execute_warmup_func

    found = warm_up._around(wait_and_warmup, server_args="args")
    assert (found is not theirs) == sends
    assert not sends or found.args == (64, theirs)
