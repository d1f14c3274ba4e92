"""The table of SGLang's options: how a wheel's source is read, and what the parser that it becomes does."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from indexcache_launch.options import OptionError, parser_of, versions
from scripts.tools.sglang_options import options_of

SOURCE = """
import argparse
CHOICES = ["b", "a"]
MORE = [*CHOICES, "c"]

class ServerArgs:
    model_path: A[str, Arg(help="x", aliases=["--model"])]
    tp_size: A[int, Arg(help="x", cli_name="--tensor-parallel-size", aliases=["--tp-size"])] = 1
    kind: A[Optional[str], Arg(help="x", choices=MORE), NS("exec")] = None
    mode: A[Literal["on", "off"] | None, "x"] = "on"
    sizes: A[Optional[List[int]], "x"] = None
    config: A[Optional[Dict[str, int]], Arg(help="x", type_parser=json.loads)] = None
    fast: A[bool, "x" "y"] = False
    hidden: A[bool, Arg(help="x", no_cli=True)] = False
    derived: A[int, Derived(doc="x")] = 3
    named: int = 4

    @staticmethod
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
        parser.add_argument("--old-kind", dest="kind", action=DeprecatedAliasStoreAction, choices=MORE, new_flag="x")
        parser.add_argument("--enable-fast", dest="kind", action=DeprecatedStoreConstAction, const_value="a")
        parser.add_argument("--try", action=argparse.BooleanOptionalAction, default=ServerArgs.fast)
        parser.add_argument("--lora-paths", nargs="*", action=LoRAPathAction)
"""


def test_a_wheels_source_is_read_without_running_it(tmp_path: Path) -> None:
    """Fields with annotations, as SGLang has them from 0.5.14 on, and options that are added one by one."""
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "server_args.py").write_text(SOURCE)
    assert options_of(tmp_path) == [
        {"names": ["--model-path", "--model"], "dest": "model_path", "action": "store"},
        {
            "names": ["--tensor-parallel-size", "--tp-size"],
            "dest": "tp_size",
            "action": "store",
            "type": "int",
            "default": 1,
        },
        {"names": ["--kind"], "dest": "kind", "choices": ["a", "b", "c"], "action": "store"},
        {"names": ["--mode"], "dest": "mode", "choices": ["off", "on"], "action": "store", "default": "on"},
        {"names": ["--sizes"], "dest": "sizes", "nargs": "+", "action": "store", "type": "int"},
        {"names": ["--config"], "dest": "config", "action": "store", "type": "json.loads"},
        {"names": ["--fast"], "dest": "fast", "action": "true", "default": False},
        {"names": ["--old-kind"], "dest": "kind", "action": "old store", "choices": ["a", "b", "c"]},
        {"names": ["--enable-fast"], "dest": "kind", "action": "old const", "const": "a"},
        {"names": ["--try"], "dest": "try", "action": "boolean", "default": False},
        {"names": ["--lora-paths"], "dest": "lora_paths", "action": "list", "nargs": "*"},
    ]


@pytest.mark.parametrize("version", versions())
def test_every_version_makes_a_parser_that_sets_what_it_is_given_alone(version: str) -> None:
    parser = parser_of(version)
    assert vars(parser.parse_args(["--tp", "8", "--enable-mixed"])) in (
        {"tp_size": 8, "enable_mixed_chunk": True},
        {"tensor_parallel_size": 8, "enable_mixed_chunk": True},
    )
    assert parser.defaults["log_level"] == "info"
    with pytest.raises(OptionError, match="ambiguous option: --enable"):
        parser.parse_args(["--enable"])
    assert parser.is_option("--tp-size") and not parser.is_option("8") and not parser.is_option("-1")


def test_flags_of_old_names_set_the_new_attribute() -> None:
    read = parser_of("0.5.17").parse_args(["--enable-breakable-cuda-graph", "--nsa-prefill-backend", "fa3"])
    assert read == argparse.Namespace(cuda_graph_backend_prefill="breakable", dsa_prefill_backend="fa3")
