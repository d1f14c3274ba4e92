"""indexcache-check: does this pattern fit this model, and would the installed SGLang really run it?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.installed import InstalledSglang, SglangError
from sglang_indexcache.overrides import FLAG, merge_overrides, parse_overrides
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file import PatternFile

DESCRIPTION = """\
Check a pattern file against a model, without starting a server.

Reads the model's config.json and the names of its weights, and asks the installed SGLang's own code which layers
would run their indexer. Exit codes: 0 all is well, 1 problems were found, 2 something could not be read."""

EXAMPLES = """\
examples:
  indexcache-check deploy/glm5.yaml@1/4 --model zai-org/GLM-5-FP8
  indexcache-check deploy/glm5.yaml --model /models/glm5 --json
"""


@dataclass(frozen=True)
class Report:
    """What was checked and found.

    Attributes:
        pattern: requested roles.
        fingerprint: of the requested pattern.
        retention: share of `F` layers.
        model: name of the model.
        source_layers: whose indices each layer uses.
        locked_layers: layers that can't be `F`.
        override: what makes SGLang run the pattern.
        sglang: version of the installed SGLang, `None` without one.
        effective: what that SGLang would run, `None` if it was not asked.
        problems: one line each; empty if all is well.
        notes: what was not checked.
    """

    pattern: str
    fingerprint: str
    retention: float
    model: str
    source_layers: tuple[int, ...]
    locked_layers: tuple[int, ...]
    override: dict[str, Any]
    sglang: str | None
    effective: str | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check(file: PatternFile, model: str, user_overrides: str = "{}", allow_config_mismatch: bool = False) -> Report:
    """Check `file` against `model`, a folder or hub id.

    Raises:
        IndexCacheError: if the model or the overrides can't be read.
    """
    checkpoint, pattern = Checkpoint.read(model), file.as_pattern()
    problems, notes = [str(error) for error in checkpoint.misfits(file, allow_config_mismatch)], []
    if checkpoint.indexer_layers is None:
        notes.append("no safetensors files at hand: indexer weights were not checked")
    override: dict[str, Any] = {}
    try:
        override = merge_overrides(parse_overrides(user_overrides), pattern)
    except IndexCacheError as error:
        problems.append(str(error))
    installed, effective = InstalledSglang.find(), None
    if installed is None:
        notes.append("SGLang is not installed here: what it would run was not checked")
    elif override and len(pattern) == checkpoint.model.num_layers:
        try:
            effective = installed.effective_pattern(model, override, len(pattern))
        except SglangError as error:
            problems.append(str(error))
        if effective is not None and effective != pattern:
            problems.append(f"SGLang {installed.version} would run {effective} instead of {pattern}")
    return Report(
        pattern.roles,
        pattern.fingerprint,
        pattern.retention,
        checkpoint.model.name,
        pattern.source_layers,
        checkpoint.locked,
        override,
        None if installed is None else installed.version,
        None if effective is None else effective.roles,
        tuple(problems),
        tuple(notes),
    )


def as_text(report: Report) -> str:
    """The report for people: a line a fact, a table by layer, problems last."""
    pattern, full = Pattern(report.pattern), report.pattern.count("F")
    lines = [
        f"pattern   {report.pattern}",
        f"          {full} of {len(pattern)} layers F, fingerprint {report.fingerprint[:16]}",
        f"model     {report.model}",
        f"sglang    {report.sglang or 'not installed'}",
        f"override  {FLAG} '{json.dumps(report.override)}'",
        "",
        "layer  role  indices of  locked" + ("  SGLang runs" if report.effective else ""),
    ]
    for layer, source in enumerate(report.source_layers):
        cells = f"{layer:>5}  {pattern[layer]:<4}  {source:>10}  {'yes' if layer in report.locked_layers else '':<6}"
        lines.append((cells + (f"  {report.effective[layer]}" if report.effective else "")).rstrip())
    lines.append("")
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"problem: {problem}" for problem in report.problems] or ["no problems"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        "indexcache-check",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pattern", help="pattern file, PATH or PATH@RETENTION")
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument(FLAG, default="{}", metavar="JSON", help="overrides that the server is started with, too")
    parser.add_argument(
        "--allow-config-mismatch", action="store_true", help="accept a file made for another config.json"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    try:
        file = PatternFile.load(options.pattern)
        report = check(file, options.model, options.json_model_override_args, options.allow_config_mismatch)
    except IndexCacheError as error:
        sys.stderr.write(f"indexcache-check: {error}\n")
        return 2
    sys.stdout.write((json.dumps(asdict(report), indent=1) if options.json else as_text(report)) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
