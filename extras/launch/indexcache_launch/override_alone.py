"""A model override by itself: which layers would engines run if somebody pasted the flag, without the launcher?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexcache_launch.launch_line import LaunchLine
from indexcache_launch.reading import OVERRIDE, READ_VERSIONS, SGLANG, Reading, named, of_version
from indexcache_launch.rules import readings as engine_readings
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dsa.override import (
    CLI_KEY,
    FREQ_KEY,
    OFFSET_KEY,
    SHARING_KEYS,
    TYPES_KEY,
    by_key,
    indexer_types,
    meanings,
)
from sglang_indexcache.families.dsa.sglang import DsaSglang, by_configuration
from sglang_indexcache.io.errors import IndexCacheError, SpellingError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.file import PatternFile
from sglang_indexcache.sglang.override_flag import FLAG, PARTS, merged, parse_overrides
from sglang_indexcache.sglang.probes import SglangError, SglangSource

_NEXTN_KEY = "num_nextn_predict_layers"


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Readings of a model with an override alone, by engine.

    Attributes:
        override: the parsed `--json-model-override-args`.
        model: name of the model.
        sglang: version of the installed SGLang, or of the unpacked one; `None` without one.
        means: the roles that its sharing keys mean; `None` if they can't be read, contradict each other, or say none.
        readings: what runs, by engine and version; first what the installed SGLang says itself.
        problems: one line each; empty if what it means runs on the SGLang at hand, or without one on all that were
            read.
        notes: what was not checked.
    """

    override: Mapping[str, Any]
    model: str
    sglang: str | None
    means: str | None
    readings: tuple[Reading, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def other_than(readings: Iterable[Reading], source: SglangSource | None, roles: str) -> Iterator[str]:
    """Yield a line for each reading that counts and runs other layers: of the SGLang at hand, or without one of all."""
    counted = [item for item in readings if item.engine == SGLANG]
    if source is not None:
        found = of_version(counted, source.version)
        counted = [] if found is None else [found]
        if found is None:
            yield f"which layers SGLang {source.version} would run is not known: {_why_unknown(source.version)}"
    for item in counted:
        if item.roles != roles:
            yield item.line + (f": {item.roles} instead of {roles}" if item.source == OVERRIDE else "")


def says_roles(overrides: Mapping[str, Any]) -> bool:
    """Return whether overrides have a key, by itself or within that of a text model, that says which layers share."""
    inner = (overrides.get(outer) for outer in PARTS)
    return any(
        key in given for given in (overrides, *inner) if isinstance(given, Mapping) for key in (*SHARING_KEYS, CLI_KEY)
    )


def alone(checkpoint: Checkpoint, overrides: Mapping[str, Any], unpacked: Path | None) -> Alone:
    """Say which layers engines would run of a checkpoint with `overrides`, which say roles, and nothing else.

    Args:
        checkpoint: the model, without overrides.
        overrides: a parsed `--json-model-override-args`.
        unpacked: an SGLang to read instead of the installed one.
    """
    adapter, architecture = checkpoint.family.sglang, checkpoint.model.architecture
    configured, source = by_configuration(adapter), SglangSource.at_hand(unpacked)
    if configured is None:
        readings: tuple[Reading, ...] = (_unread_everywhere(checkpoint, overrides),)
    else:
        readings = engine_readings(architecture, checkpoint.config, overrides)
    notes: list[str] = []
    if source is None:
        notes.append("SGLang is not installed here: all versions that were read count")
    elif source.version.partition("+")[0] not in READ_VERSIONS:
        notes.append(f"SGLang {source.version}: {_why_unknown(source.version)}")
    if source is not None and unpacked is None and configured is not None and source.refusal(configured.rule) is None:
        readings = _asked(configured, source, checkpoint.path, overrides, readings)
    problems, means = [], None
    try:
        means = _meant(overrides, checkpoint)
        adapter.checkpoint.check_overrides(overrides)
        problems += [str(error) for error in checkpoint.misfits(means)]
        notes += unlike_uniform(overrides, len(means))
    except IndexCacheError as error:
        text = str(error)
        problems.append(text if text.startswith(FLAG) else f"{FLAG}: {text}")
    problems += () if means is None else other_than(readings, source, means.roles)
    return Alone(
        override=overrides,
        model=checkpoint.model.name,
        sglang=None if source is None else source.version,
        means=None if means is None else means.roles,
        readings=readings,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def of_flag(model: str, text: str, unpacked: Path | None) -> Alone:
    """Say what `--json-model-override-args` alone would run; see `alone`.

    Raises:
        IndexCacheError: if the model or the override can't be read, or the override says nothing of roles.
    """
    overrides = parse_overrides(text)
    if not says_roles(overrides):
        raise SpellingError(f"{FLAG} says nothing of roles; expected one of {', '.join(SHARING_KEYS)}, or a pattern")
    return alone(Checkpoint.read(model), overrides, unpacked)


def contradictions(checkpoint: Checkpoint) -> list[str]:
    """Return a line for each sharing key of a config.json that contradicts another: versions of SGLang take either."""
    if by_configuration(checkpoint.family.sglang) is None or not says_roles(checkpoint.config):
        return []
    found = contradicting(checkpoint.config, checkpoint.model.num_layers)
    return [f"config.json: {line}; without the launcher, versions of SGLang take one or the other" for line in found]


def contradicting(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return a line for each sharing key of `config` that means something else than the winning one."""
    (winner, pattern), *others = by_key(config, num_layers).items() or [("", None)]
    return [f"{key} means {other}, {winner} {pattern}" for key, other in others if other != pattern]


def unlike_uniform(overrides: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return a line for a freq that wins, and is not the paper's uniform interleaving."""
    winner, pattern = next(iter(by_key(overrides, num_layers).items()))
    freq = overrides.get(FREQ_KEY)
    if winner != FREQ_KEY or not isinstance(freq, int) or freq < 2:
        return []
    uniform = Pattern.uniform(num_layers, freq)
    return [] if pattern == uniform else [f"{FREQ_KEY}={freq} is {pattern}, not the paper's uniform {uniform}"]


def in_launch_line(
    line: LaunchLine,
    pattern: Pattern,
    family: Family,
    *,
    file: PatternFile | None,
    unpacked: Path | None,
    allow_config_mismatch: bool,
) -> tuple[list[str], list[str]]:
    """Judge the override of a launch line beside a pattern, where no other model is named; see `fit.check` for one.

    Args:
        line: the launch line; its `--model-path` is read if it is a folder.
        pattern: the pattern.
        family: the family that the pattern is for, where it is none.
        file: the pattern's file, which says for which model it is.
        unpacked: an SGLang to read instead of the installed one.
        allow_config_mismatch: whether the file may be made for another config.json.

    Returns:
        Problems, if it is not one that the launcher would add the pattern to, or makes another model than that of the
        file; warnings, if it would run other layers alone, or nobody can say which model it makes.

    Raises:
        IndexCacheError: if the model can't be read.
    """
    text = line.json_model_override_args
    if text is None:
        return [], []
    folder = isinstance(line.model_path, str) and Path(line.model_path).is_dir()
    checkpoint = Checkpoint.read(line.model_path) if folder else None
    adapter = (family if checkpoint is None else checkpoint.family).sglang
    problems: list[str] = []
    warnings: list[str] = []
    try:
        overrides = parse_overrides(str(text))
        adapter.to_overrides(overrides, pattern)
        if checkpoint is not None:
            served = Checkpoint.read(checkpoint.path, overrides)
            problems += map(str, served.misfits(pattern, file, allow_config_mismatch))
        elif file is not None and not allow_config_mismatch:
            warnings += _check_same(file, overrides)
    except IndexCacheError as error:
        return [str(error)], []
    if not says_roles(overrides):
        return problems, warnings
    if checkpoint is not None:
        found = [alone(checkpoint, overrides, unpacked).readings]
    else:
        architectures = adapter.checkpoint.keys if file is None else [file.model.architecture]
        config, configured = _bare_config(pattern, file), by_configuration(adapter)
        found = [engine_readings(name, config, overrides) if configured else () for name in architectures]
    for readings in found:
        warnings += map(without_launcher, other_than(readings, SglangSource.at_hand(unpacked), pattern.roles))
    return problems, warnings


def _check_same(file: PatternFile, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Check that overrides make no other model than that of the file; yield a warning if nobody can say that.

    Raises:
        IndexCacheError: if they make another one, none, or one that only a config.json would tell.
    """
    if not merged({}, overrides):
        return
    if file.model.config is None:
        yield f"{FLAG}: whether it makes another model than that of the file is not known; expected --model"
        return
    config = _config_of(file.model.architecture, file.model.config)
    file.model.check(describe(merged(config, overrides), f"{file.model.name} with {FLAG}"))


def _config_of(architecture: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that a pattern file's `config` is of: what it says, with the defaults written out."""
    found = {"architectures": [architecture], **family_of(architecture).checkpoint.keys[architecture].defaults}
    for name, value in facts.items():
        *outer, key = name.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[key] = value
    return found


def without_launcher(line: str) -> str:
    """Say that a reading is of the override alone."""
    return f"without the launcher, {line}"


def as_text(found: Alone) -> str:
    """Return a report for people: what the override means, a line for each reading, problems last."""
    lines = [
        f"override  {FLAG} '{json.dumps(found.override)}', without the launcher",
        f"means     {found.means or 'no pattern'}",
        f"model     {found.model}",
        f"sglang    {found.sglang or 'not installed'}",
        "",
        *reading_lines(found.readings, found.means),
        "",
        *(f"note: {note}" for note in found.notes),
        *([f"problem: {problem}" for problem in found.problems] or ["no problems"]),
    ]
    return "\n".join(lines)


def reading_lines(readings: tuple[Reading, ...], means: str | None) -> list[str]:
    """Return the line of each reading, with letters below it where they are not those that are meant, or all alike."""
    lines = []
    for item in readings:
        lines.append(item.line)
        if item.roles is not None and item.roles != means and len(set(item.roles)) > 1:
            lines.append(f"  {item.roles}")
    return lines


def _meant(overrides: Mapping[str, Any], checkpoint: Checkpoint) -> Pattern:
    """Return the one pattern that all sharing keys mean.

    Raises:
        SpellingError: if there is none.
    """
    if (overrides.get(CLI_KEY) or 1) != 1:
        raise SpellingError(f"{CLI_KEY} is {overrides[CLI_KEY]}, which is LongCat's; expected none")
    inherited = (_NEXTN_KEY, OFFSET_KEY) if FREQ_KEY in overrides else (_NEXTN_KEY,)
    given = {**{key: checkpoint.config.get(key) for key in inherited}, **overrides}
    layers = overrides.get("num_hidden_layers", checkpoint.model.num_layers)
    if layers != checkpoint.model.num_layers:
        raise SpellingError(
            f"num_hidden_layers is {layers}, {checkpoint.model.name} has {checkpoint.model.num_layers}; expected a"
            " config.json of that depth"
        )
    found = meanings(given, layers)
    if not found:
        raise SpellingError(f"{', '.join(key for key in SHARING_KEYS if key in overrides)} of null means no pattern")
    (first, pattern), *others = found.items()
    for key, other in others:
        if other != pattern:
            raise SpellingError(f"{first} means {pattern}, {key} {other}; expected one of them")
    return pattern


def _bare_config(pattern: Pattern, file: PatternFile | None) -> dict[str, Any]:
    """Return what is known of a config.json where no model is named."""
    locked = () if file is None else file.model.locked_layers
    config: dict[str, Any] = {"num_hidden_layers": len(pattern)}
    if locked:
        config[TYPES_KEY] = indexer_types(Pattern.full(len(pattern), locked))
    return config


def _asked(
    adapter: DsaSglang, source: SglangSource, model: str, overrides: Mapping[str, Any], readings: tuple[Reading, ...]
) -> tuple[Reading, ...]:
    """Put what the installed SGLang says itself before what was read of its source, if that is anything else."""
    version = source.version.partition("+")[0]
    known = of_version(readings, version)
    letters = next((len(item.roles) for item in readings if item.roles is not None), 1)
    try:
        roles = adapter.would_run(source, model, overrides, letters)
        line = f"{named(SGLANG, (version,))} says itself that it runs {roles}"
    except SglangError as error:
        roles, line = None, str(error)
    if known is not None and known.roles == roles:
        return readings
    own = Reading(engine=SGLANG, versions=(version,), roles=roles, key=None, source=None, ignored=(), line=line)
    return (own, *readings)


def _why_unknown(version: str) -> str:
    if version.partition("+")[0] in READ_VERSIONS:
        return "it does not have this model"
    return f"not read yet; newest read is {READ_VERSIONS[-1]}"


def _unread_everywhere(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> Reading:
    """Return what SGLang runs of models whose configuration has no roles."""
    native, name = checkpoint.model.native, named(SGLANG, READ_VERSIONS)
    given = tuple(key for key in (*SHARING_KEYS, CLI_KEY) if overrides.get(key) is not None)
    architecture, rest = checkpoint.model.architecture, f"all {len(native)} layers stay {native.full_role}"
    does = f" ignores {', '.join(given)} on {architecture} (it reads no such key there)" if given else ""
    return Reading(
        engine=SGLANG,
        versions=READ_VERSIONS,
        roles=native.roles,
        key=None,
        source=None,
        ignored=given,
        line=f"{name}{does}: {rest}",
    )
