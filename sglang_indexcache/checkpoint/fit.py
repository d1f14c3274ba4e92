"""Does a pattern fit a model, and would the installed SGLang run it?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.checkpoint.findings import Checked, Findings, remarks_on
from sglang_indexcache.families.dsa.sglang import by_configuration
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern.selection import PatternSelection
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.sglang.meaning import Meaning
from sglang_indexcache.sglang.override_flag import FLAG, parse_overrides
from sglang_indexcache.sglang.probes import SglangError, SglangSource


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check.

    Attributes:
        source: the file and retention, uniform or letters; of a file on the hub, with its commit.
        pattern: requested roles.
        fingerprint: sha256 of the requested pattern.
        retention: share of layers that are not shared.
        selection: the pattern's own, of a model without indexers.
        model: name of the model.
        source_layers: for each layer, the layer whose indices it uses.
        locked_layers: layers that can only be `S`.
        override: the model override that makes SGLang run the pattern.
        layers: the model layer that each letter stands for.
        sglang: version of the installed SGLang, `None` without one.
        effective: roles that SGLang would run; `None` if this is not known.
        found: problems, which are empty if all is well; warnings; notes; what extensions say.
    """

    source: str
    pattern: str
    fingerprint: str
    retention: float
    selection: PatternSelection | None
    model: str
    source_layers: tuple[int, ...]
    locked_layers: tuple[int, ...]
    override: dict[str, Any]
    layers: tuple[int, ...]
    sglang: str | None
    effective: str | None
    found: Findings

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for `--json`."""
        own: dict[str, Any] = asdict(self)
        found = own.pop("found")
        return {**own, **{name: list(found[name]) for name in ("problems", "warnings", "notes")}, **found["content"]}


def check(
    spec: PatternSpec,
    checkpoint: Checkpoint,
    *,
    user_overrides: str = "{}",
    allow_config_mismatch: bool = False,
    unpacked: Path | None = None,
    arguments: Any = None,
) -> Report:
    """Check the pattern that `spec` names against a checkpoint, as a server would read it.

    Args:
        spec: the pattern.
        checkpoint: the model, without overrides.
        user_overrides: `--json-model-override-args`; what they make of the model is what must fit.
        allow_config_mismatch: whether the file may be made for another config.json.
        unpacked: an SGLang to read instead of the installed one.
        arguments: a launch line, for the heads of a rank; `None` where none was given.

    Raises:
        IndexCacheError: if the model or the overrides can't be read.
    """
    served, pattern = checkpoint, spec.unchecked(checkpoint.model.native, checkpoint.locked)
    family, override, given, problems, notes = checkpoint.family, None, {}, list[str](), list[str]()
    try:
        given = parse_overrides(user_overrides)
        override = family.sglang.to_overrides(given, pattern)
        served = Checkpoint.read(checkpoint.path, given) if given else checkpoint
    except IndexCacheError as error:
        problems.append(str(error))
    problems = [*map(str, served.misfits(pattern, spec.file, allow_config_mismatch)), *problems]
    if spec.is_uniform and len(checkpoint.locked) and pattern != spec.unchecked(checkpoint.model.native, ()):
        notes.append("uniform keeps F the layers that are nearest to its places, since others are locked")
    if checkpoint.indexer_layers is None:
        notes.append("no safetensors files at hand: indexer weights were not checked")
    heads = list(family.sglang.head_troubles(served.model, Meaning(arguments)))
    problems += [trouble.line for trouble in heads if trouble.certain]
    installed, effective = SglangSource.at_hand(unpacked), None
    if pattern.indexers and override is not None:
        notes.append("blocks of queries are set after loading: SGLang has no rule that could be asked before")
        lacking = [] if installed is None else [installed.refusal(feature) for feature in family.sglang.needed(pattern)]
        problems += [reason for reason in lacking if reason is not None]
    if installed is None:
        notes.append("SGLang is not installed here: what it would run was not checked")
    elif (reason := installed.refusal(family.sglang.serving)) is not None:
        problems.append(reason)
    elif (configured := by_configuration(family.sglang)) is None:
        notes.append("roles are written after loading: SGLang has no rule that could be asked before")
    elif unpacked is not None:
        notes.append(f"SGLang {installed.version} in {unpacked} was read, not run: what it would run was not checked")
    elif override is not None and len(pattern) == checkpoint.model.num_layers:
        try:
            effective = configured.would_run(installed, checkpoint.path, override, len(pattern))
        except SglangError as error:
            problems.append(str(error))
        if effective is not None and effective != pattern.roles:
            problems.append(f"SGLang {installed.version} would run {effective} instead of {pattern}")
    remarks = remarks_on(
        Checked(
            pattern=pattern,
            spec=spec,
            checkpoint=checkpoint,
            overrides=given,
            merged=override is not None,
            unpacked=unpacked,
        )
    )
    return Report(
        source=spec.text,
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
        effective=effective,
        found=replace(
            remarks,
            problems=tuple(problems),
            warnings=(*(trouble.line for trouble in heads if not trouble.certain), *remarks.warnings),
            notes=(*notes, *remarks.notes),
        ),
    )


def as_text(report: Report, last: bool = True) -> str:
    """Return the report for people: one line for each fact, a table by layer, problems last.

    Args:
        report: the report.
        last: if false, more is checked behind it, and it does not say that there are no problems.
    """
    pattern = Pattern.parse(report.pattern, report.selection)
    own = f" and {len(pattern.own_layers)} F" if pattern.own_layers else ""
    lines = [
        f"pattern   {report.pattern}",
        f"          {len(pattern.full_layers)} of {len(pattern)} layers {pattern.full_role}{own},"
        f" fingerprint {report.fingerprint[:16]}",
        f"source    {report.source}",
        *([] if report.selection is None else [f"selection {report.selection.in_words()}"]),
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
    lines += [*report.found.lines, *report.found.remarks()]
    lines += [f"problem: {problem}" for problem in report.found.problems] or ["no problems"] * last
    return "\n".join(lines).rstrip()
