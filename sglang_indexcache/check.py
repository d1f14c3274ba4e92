"""The command `indexcache-check`: does a pattern fit a model, would SGLang run it, do servers serve it?"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, so that Ctrl-C while they load is one line, too
    from sglang_indexcache.process import begin

    begin("indexcache-check")

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from sglang_indexcache import __version__, process
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.files.spec import GRAMMAR, PatternSpec
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.servers import differences
from sglang_indexcache.model.checkpoint import Checkpoint
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern.reuse import NO_MEMORY
from sglang_indexcache.pattern.selection import Selection
from sglang_indexcache.process import exit_line
from sglang_indexcache.serving import combinations
from sglang_indexcache.sglang.environment import Environment
from sglang_indexcache.sglang.launch_line import LaunchLine
from sglang_indexcache.sglang.overrides import FLAG, parse_overrides
from sglang_indexcache.sglang.probes import SglangError, SglangSource

DESCRIPTION = f"""\
Check a pattern file, without starting a server.

With --model: read the model's config.json and the names of its weights, and ask the installed SGLang's own code which
layers would run their indexer. With --server-args: say what of a launch line was run together with a pattern, and what
is refused. With --server: compare with what running servers report, so that prefill and decode servers,
replicas and nodes are known to serve one pattern. With --environment: what the plugin can do with the installed SGLang.

{exit_codes("problems were found")}"""

EXAMPLES = """\
examples:
  indexcache-check deploy/glm5.yaml@1/4 --model zai-org/GLM-5-FP8
  indexcache-check deploy/glm5.yaml@1/4 --server http://prefill:30000 --server http://decode:30000
  indexcache-check deploy/glm5.yaml@1/4 --server-args "--tp 8 --enable-dp-attention --dp 8 --ep-size 8"
  indexcache-check --environment
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check.

    Attributes:
        pattern: requested roles.
        fingerprint: sha256 of the requested pattern.
        retention: share of layers that are not shared.
        selection: pages that S layers of a dense model attend to.
        model: name of the model.
        source_layers: for each layer, the layer whose indices it uses.
        locked_layers: layers that can only be `S`.
        override: the model override that makes SGLang run the pattern.
        layers: the model layer that each letter stands for.
        sglang: version of the installed SGLang, `None` without one.
        effective: roles that SGLang would run; `None` if this is not known.
        problems: one line each; empty if all is well.
        notes: checks that were left out.
    """

    pattern: str
    fingerprint: str
    retention: float
    selection: Selection | None
    model: str
    source_layers: tuple[int, ...]
    locked_layers: tuple[int, ...]
    override: dict[str, Any]
    layers: tuple[int, ...]
    sglang: str | None
    effective: str | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check(
    spec: PatternSpec,
    model: str,
    user_overrides: str = "{}",
    allow_config_mismatch: bool = False,
    unpacked: Path | None = None,
) -> Report:
    """Check the pattern that `spec` names against `model`, a folder or hub id.

    Args:
        spec: the pattern.
        model: folder or hub id.
        user_overrides: `--json-model-override-args`.
        allow_config_mismatch: whether the file may be made for another config.json.
        unpacked: an SGLang to read instead of the installed one.

    Raises:
        IndexCacheError: if the model or the overrides can't be read.
    """
    checkpoint = Checkpoint.read(model)
    pattern = spec.unchecked(checkpoint.model.native, checkpoint.locked)
    problems, notes = [str(error) for error in checkpoint.misfits(pattern, spec.file, allow_config_mismatch)], []
    if spec.is_uniform and len(checkpoint.locked) and pattern != spec.unchecked(checkpoint.model.native, ()):
        notes.append("uniform keeps F the layers that are nearest to its places, since others are locked")
    if checkpoint.indexer_layers is None:
        notes.append("no safetensors files at hand: indexer weights were not checked")
    family, override = checkpoint.family, None
    try:
        override = family.sglang.to_overrides(parse_overrides(user_overrides), pattern)
    except IndexCacheError as error:
        problems.append(str(error))
    installed, effective = SglangSource.installed() if unpacked is None else SglangSource.at(unpacked), None
    if pattern.indexers and override is not None:
        notes.append("blocks of queries are set after loading: SGLang has no rule that could be asked before")
        lacking = [] if installed is None else [installed.refusal(feature) for feature in family.sglang.needed(pattern)]
        problems += [reason for reason in lacking if reason is not None]
    if installed is None:
        notes.append("SGLang is not installed here: what it would run was not checked")
    elif (reason := installed.refusal(family.sglang.serving)) is not None:
        problems.append(reason)
    elif family.sglang.rule is None:
        notes.append("roles are written after loading: SGLang has no rule that could be asked before")
    elif unpacked is not None:
        notes.append(f"SGLang {installed.version} in {unpacked} was read, not run: what it would run was not checked")
    elif override is not None and len(pattern) == checkpoint.model.num_layers:
        try:
            effective = family.sglang.would_run(installed, model, override, len(pattern))
        except SglangError as error:
            problems.append(str(error))
        if effective is not None and effective != pattern.plain():
            problems.append(f"SGLang {installed.version} would run {effective} instead of {pattern}")
    return Report(
        pattern=pattern.letters,
        fingerprint=pattern.fingerprint,
        retention=pattern.retention,
        selection=pattern.selection,
        model=checkpoint.model.name,
        source_layers=pattern.source_layers,
        locked_layers=checkpoint.locked,
        override=override or {},
        layers=checkpoint.model.layers,
        sglang=None if installed is None else installed.version,
        effective=None if effective is None else effective.roles,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def as_text(report: Report) -> str:
    """Return the report for people: one line for each fact, a table by layer, problems last."""
    pattern = Pattern.parse(report.pattern, report.selection)
    lines = [
        f"pattern   {report.pattern}",
        f"          {len(pattern.full_layers)} of {len(pattern)} layers {pattern.full_role},"
        f" fingerprint {report.fingerprint[:16]}",
        *([] if report.selection is None else [f"selection {_selection(report.selection)}"]),
        f"model     {report.model}",
        f"sglang    {report.sglang or 'not installed'}",
        f"override  {FLAG} '{json.dumps(report.override)}'" if report.override else "override  none",
        "",
        "letter  layer  role  choice of   locked" + ("  SGLang runs" if report.effective else ""),
    ]
    for letter, (source, layer) in enumerate(zip(report.source_layers, report.layers, strict=False)):
        locked = "yes" if letter in report.locked_layers else ""
        cells = f"{letter:>6}  {layer:>5}  {pattern[letter]:<4}  {report.layers[source]:>10}  {locked:<6}"
        lines.append((cells + (f"  {report.effective[letter]}" if report.effective else "")).rstrip())
    lines.append("")
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"problem: {problem}" for problem in report.problems] or ["no problems"]
    return "\n".join(lines)


def _selection(selection: Selection) -> str:
    """Return a selection in words: `64 pages of 16 tokens (8 recent), by token_max, steps ema:0.9`."""
    sinks = f", {selection.sink_pages} sinks" if selection.sink_pages else ""
    pages = f"{selection.pages} pages of {selection.page_tokens} tokens"
    steps = "" if selection.steps == NO_MEMORY else f", steps {selection.steps}"
    buffer = "" if selection.buffer_pages is None else f", {selection.buffer_pages} pages on the device"
    return f"{pages} ({selection.recent_pages} recent{sinks}), by {selection.score}{steps}{buffer}"


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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pattern", nargs="?", help=GRAMMAR)
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--server", action="append", default=[], metavar="URL", help="a running server; repeatable")
    parser.add_argument(FLAG, default="{}", metavar="JSON", help="overrides that the server is started with, too")
    parser.add_argument(
        "--allow-config-mismatch", action="store_true", help="accept a file made for another config.json"
    )
    parser.add_argument(
        "--server-args", metavar="FLAGS", help="a launch line of SGLang's: what was run together, and what is refused"
    )
    parser.add_argument("--environment", action="store_true", help="show what this SGLang offers, feature by feature")
    parser.add_argument("--sglang", type=Path, metavar="FOLDER", help="an unpacked wheel instead of the installed one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    options, unknown = parser.parse_known_args(_joined(sys.argv[1:] if arguments is None else arguments))
    if unknown:  # argparse would print their values, keys among them
        parser.error(f"no such option: {unknown[0].partition('=')[0]}")
    if options.environment == (options.pattern is not None):
        parser.error("expected either a pattern or --environment")
    if options.pattern is not None and options.model is None and not options.server and options.server_args is None:
        parser.error("expected --model, --server or --server-args to check the pattern against")
    for flag, given, wanted in (
        ("--model", options.environment and options.model, "a pattern"),
        ("--server", options.environment and options.server, "a pattern"),
        ("--server-args", options.environment and options.server_args is not None, "a pattern"),
        (FLAG, options.model is None and options.json_model_override_args != "{}", "--model"),
        ("--allow-config-mismatch", options.model is None and options.allow_config_mismatch, "--model"),
        ("--sglang", options.model is None and not options.environment and options.sglang, "--model or --environment"),
    ):
        if given:
            parser.error(f"{flag} is used with {wanted} alone")
    try:
        return _environment(options) if options.environment else _pattern(options)
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


def _environment(options: argparse.Namespace) -> int:
    source = SglangSource.installed() if options.sglang is None else SglangSource.at(options.sglang)
    if source is None:
        raise SglangError(
            "SGLang is not installed here; expected: pip install 'sglang-indexcache[sglang]', or --sglang WHEEL"
        )
    environment = Environment.of(source)
    sys.stdout.write((json.dumps(asdict(environment), indent=1) if options.json else environment.as_text()) + "\n")
    return 0 if environment.can_serve else 1


def _pattern(options: argparse.Namespace) -> int:
    spec = PatternSpec.read(options.pattern)
    result: dict[str, Any] = {}
    text, problems, report = [], [], None
    if options.model is not None:
        overrides, unpacked = options.json_model_override_args, options.sglang
        report = check(spec, options.model, overrides, options.allow_config_mismatch, unpacked)
        result, text, problems = asdict(report), [as_text(report)], list(report.problems)
    if options.server_args is not None:
        pattern = spec.known() if report is None else Pattern.parse(report.pattern, report.selection)
        arguments = LaunchLine.parse(shlex.split(options.server_args))
        found = list(combinations.verdicts(pattern, combinations.family_in(spec), arguments))
        refused = [verdict.why for verdict in found if verdict.state == combinations.REFUSED]
        problems += refused
        result |= {"combinations": [asdict(verdict) for verdict in found], "problems": problems}
        lines = [verdict.line for verdict in found if verdict.state != combinations.REFUSED]
        text.append("\n".join([combinations.proven_first(arguments), *lines, *(f"problem: {why}" for why in refused)]))
    if options.server:
        pattern = spec.known() if report is None else Pattern.parse(report.pattern, report.selection)
        servers = [Address.of(url) for url in options.server]
        server_problems = [line for server in servers for line in differences(server, pattern)]
        result = {**result, "servers": [server.label for server in servers], "fingerprint": pattern.fingerprint}
        result["problems"] = problems = problems + server_problems
        text.append(
            "\n".join(f"problem: {line}" for line in server_problems)
            or f"{len(servers)} server(s) serve fingerprint {pattern.fingerprint[:16]}"
        )
    sys.stdout.write((json.dumps(result, indent=1) if options.json else "\n\n".join(text)) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    process.run("indexcache-check", main)
