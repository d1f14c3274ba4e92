"""The command `indexcache-check`: does a pattern fit a model, would SGLang run it, do servers serve it?"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, so that Ctrl-C while they load is one line, too
    from sglang_indexcache.process import begin

    begin("indexcache-check")

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn

from sglang_indexcache import process
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.checkpoint.findings import Checked, Findings, Launch, Listing, reader, remarks_on
from sglang_indexcache.checkpoint.fit import as_text, check
from sglang_indexcache.command_line import exit_codes, shown_command
from sglang_indexcache.http import served_table, servers
from sglang_indexcache.http.address import Address
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.extensions import extensions
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.pattern_name import GRAMMAR, PatternSpec, spells_letters
from sglang_indexcache.pattern_file.result_folder import result_folder
from sglang_indexcache.process import exit_line
from sglang_indexcache.serving.preflight import unread_features
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.meaning import Meaning
from sglang_indexcache.sglang.override_flag import FLAG, parse_overrides
from sglang_indexcache.sglang.probes import SglangSource
from sglang_indexcache.version import version

DESCRIPTION = f"""
Check a pattern file, without starting a server.

With --model: read the model's config.json and the names of its weights, and ask the installed SGLang's own code which
layers would run their indexer; without a pattern, say which layers the given overrides alone would run, by version.
With --server-args: say what of a launch line was run together with a pattern, and what is refused. With --server:
compare with what running servers report, so that prefill and decode servers, replicas and nodes are known to serve one
pattern, and show all that each says of it. With --environment: what the plugin can do with the installed SGLang.

The folder of a search, or org/name of a repository on the hub that has its files, stands for its pattern.yaml; first
its files must belong together and be unchanged. --known lists the patterns that others published.

{exit_codes("problems were found")}"""

EXAMPLES = """examples:
  indexcache-check deploy/glm5/pattern.yaml@1/4 --model zai-org/GLM-5-FP8
  indexcache-check deploy/glm5/pattern.yaml@1/4 --server http://prefill:30000 --server http://decode:30000
  indexcache-check deploy/glm5/pattern.yaml@1/4 --server-args "--tp 8 --enable-dp-attention --dp 8 --ep-size 8"
  indexcache-check --model zai-org/GLM-5-FP8 --json-model-override-args '{"index_topk_freq": 4}'
  indexcache-check deploy/glm5
  indexcache-check org/name/pattern.yaml@1/4 --model zai-org/GLM-5-FP8
  indexcache-check --known
  indexcache-check --environment
"""


class _AtAnyWidth(argparse.RawDescriptionHelpFormatter):
    """Paragraphs and commands as wide as the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return "\n".join(
                shown_command(line.strip(), width, "  ") if line[:1] == " " else line for line in text.splitlines()
            )
        return "\n\n".join(fill(" ".join(block.split()), width) for block in text.split("\n\n"))


class _CheckParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = _CheckParser(
        "indexcache-check",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=_AtAnyWidth,
    )
    parser.add_argument("pattern", nargs="?", help=f"{GRAMMAR}; or the folder of a search")
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--server", action="append", default=[], metavar="URL", help="a running server; repeatable")
    parser.add_argument(
        FLAG,
        default="{}",
        metavar="JSON",
        help="overrides that the server is started with; without a pattern: what they alone run",
    )
    parser.add_argument(
        "--allow-config-mismatch", action="store_true", help="accept a file made for another config.json"
    )
    parser.add_argument(
        "--server-args",
        metavar="FLAGS",
        help="a launch line of SGLang's: what was run together, what is refused, and what can't be judged",
    )
    listings = {name: each() for name, each in extensions("listings", Listing).items()}
    for name, listing in listings.items():
        parser.add_argument(f"--{name}", action="store_true", help=listing.help)
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="an unpacked wheel instead of the installed one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    options, unknown = parser.parse_known_args(_joined(sys.argv[1:] if arguments is None else arguments))
    if unknown:  # argparse would print their values, keys among them
        parser.error(f"no such option: {unknown[0].partition('=')[0]}")
    for name, value in vars(options).items():
        if any(word in ([], "--") for word in (value if name == "server" else [value])):  # up to Python 3.11 `--` is []
            parser.error(f"--{name.replace('_', '-')}: found --, expected a value")
    pasted = options.pattern is None and options.model is not None and options.json_model_override_args != "{}"
    listed = [listing for name, listing in listings.items() if getattr(options, name)]
    if len(listed) + (options.pattern is not None) + pasted != 1:
        named = "".join(f" --{name}," for name in listings)
        parser.error(f"expected one of a pattern,{named} and --model with {FLAG}")
    readers = [("--model", options.model), ("--server-args", options.server_args)]  # of an SGLang
    readers += [(f"--{name}", getattr(options, name) or None) for name, item in listings.items() if item.reads_sglang]
    for flag, given, wanted in (
        ("--model", options.pattern is None and options.model and not pasted, "a pattern"),
        ("--server", options.pattern is None and options.server, "a pattern"),
        ("--server-args", options.pattern is None and options.server_args is not None, "a pattern"),
        (FLAG, options.model is None and options.json_model_override_args != "{}", "--model"),
        ("--allow-config-mismatch", options.model is None and options.allow_config_mismatch, "--model"),
        (
            "--sglang",
            options.sglang and all(value is None for _, value in readers),
            " or ".join(", ".join(flag for flag, _ in readers).rsplit(", ", 1)),
        ),
    ):
        if given:
            parser.error(f"{flag} is used with {wanted} alone")
    try:
        if listed:
            return _write(options, listed[0].find(options.sglang))
        if pasted:
            return _write(options, reader(FLAG).alone(options.model, options.json_model_override_args, options.sglang))
        return _pattern(options)
    except Exception as error:
        line, code = exit_line(error)
        sys.stderr.write(f"indexcache-check: {line}\n")
        return code


def _joined(words: Sequence[str]) -> list[str]:
    """Join `--server-args` with its value: argparse takes a value like `--tp` for another option."""
    found = list(words)
    for place, word in enumerate(found[:-1]):
        if word == "--server-args":
            found[place : place + 2] = [f"{word}={found[place + 1]}"]
            break
    return found


def _write(options: argparse.Namespace, found: Findings) -> int:
    """Print what was found, and return the exit code."""
    text = json.dumps(found.content, indent=1) if options.json else "\n".join(found.lines)
    sys.stdout.write(f"{text}\n")
    return 1 if found.problems else 0


def _pattern(options: argparse.Namespace) -> int:
    folder = None if spells_letters(options.pattern) else result_folder(options.pattern)
    against = options.model is not None or options.server or options.server_args is not None
    if folder is None and not against:
        raise IndexCacheError("expected --model, --server or --server-args to check the pattern against")
    result: dict[str, Any] = {"problems": []}
    text: list[str] = []
    if folder is not None:
        result = {"folder": folder.name, "problems": folder.problems()}
        text.append(folder.as_text(result["problems"]))
    if against and not result["problems"]:  # what was changed is not read on
        _check_against(options, PatternSpec.read(options.pattern if folder is None else folder.pattern), result, text)
    return _write(options, Findings(problems=tuple(result["problems"]), lines=("\n\n".join(text),), content=result))


def _check_against(options: argparse.Namespace, spec: PatternSpec, result: dict[str, Any], text: list[str]) -> None:
    """Check a pattern against all that the options name; add to `result` and to paragraphs of `text`."""
    launch = None if options.server_args is None else reader("--server-args").read(options.server_args, options.sglang)
    more = launch is not None or bool(options.server)
    checkpoint = None
    if options.model is not None:
        overrides = _overrides(options, launch)
        checkpoint = Checkpoint.read(options.model)
        report = check(
            spec,
            checkpoint,
            user_overrides=overrides,
            allow_config_mismatch=options.allow_config_mismatch or (launch is not None and launch.asked.allow_mismatch),
            unpacked=options.sglang,
            arguments=None if launch is None else launch.arguments,
        )
        pattern = Pattern.parse(report.pattern, report.selection)
        result |= report.as_dict()
        source = SglangSource.at_hand(options.sglang) if launch is None else None  # else the line's check says it
        lines = unread_features(source, pattern, checkpoint.family, Asked(), Meaning(None))
        result["problems"] += lines
        text.append(as_text(report, last=not (more or lines)))
        text += ["\n".join(f"problem: {line}" for line in lines)] if lines else []
    else:
        pattern = spec.known()
        remarks = remarks_on(Checked(pattern=pattern, spec=spec))
        result |= {"source": spec.text, "warnings": list(remarks.warnings), "notes": list(remarks.notes)}
        pinned = [f"source    {spec.text}"] if spec.text != options.pattern else []
        text += ["\n".join(lines)] if (lines := [*pinned, *remarks.remarks()]) else []
    if launch is not None:
        checked = Checked(pattern=pattern, spec=spec, checkpoint=checkpoint, unpacked=options.sglang)
        found = launch.check(checked, options.pattern)
        result["warnings"] = [*result.get("warnings", ()), *found.warnings]
        result["problems"] += found.problems
        result |= found.content
        text.append("\n".join([*found.lines, *found.remarks(), *(f"problem: {why}" for why in found.problems)]))
    if options.server:
        _check_servers([Address.of(url) for url in options.server], pattern, result, text)
    if checkpoint is not None and more and not result["problems"]:
        text.append("no problems")


def _overrides(options: argparse.Namespace, launch: Launch | None) -> str:
    """Return the overrides that the server is started with: those of the check's own flag, or of the launch line."""
    own: str = options.json_model_override_args
    text = None if launch is None else launch.arguments.json_model_override_args
    if text is None:
        return own
    if own != "{}" and parse_overrides(own) != parse_overrides(str(text)):
        raise IndexCacheError(f"{FLAG} is not that of --server-args; expected one of the two")
    return str(text)


def _check_servers(addresses: Sequence[Address], pattern: Pattern, result: dict[str, Any], text: list[str]) -> None:
    found = [rank for address in addresses for rank in servers.ranks(address)]
    problems = [line for rank in found if (line := rank.problem(pattern)) is not None]
    result |= {
        "servers": [address.label for address in addresses],
        "fingerprint": pattern.fingerprint,
        "ranks": [rank.model_dump() for rank in found],
        "differs": served_table.differing(found),
    }
    result["problems"] += problems
    serve = "1 server serves" if len(addresses) == 1 else f"{len(addresses)} servers serve"
    verdict = [f"problem: {line}" for line in problems] or [f"{serve} fingerprint {pattern.fingerprint[:16]}"]
    text.append("\n".join([served_table.as_text(found), "", *verdict]))


if __name__ == "__main__":
    process.run("indexcache-check", main)
