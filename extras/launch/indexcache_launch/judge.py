"""Judge a launch line: what of it ran with a pattern, is refused, never ran, or could not be judged.

`launch_server` and `indexcache-check --server-args` say the same, by this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from indexcache_launch import variables as environment
from indexcache_launch.combinations import COMBINATIONS, PLAIN, drafts_of
from indexcache_launch.harmless import HARMLESS
from indexcache_launch.launch_line import LaunchLine, Readings
from indexcache_launch.options import versions
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.families import family_of
from sglang_indexcache.families.base import Family, SglangAdapter
from sglang_indexcache.families.combination import NOT_RUN, RAN, REFUSED, UNJUDGED, Combination, Verdict
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.messages import NOT_COMBINED
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.counted import kinds_of
from sglang_indexcache.serving.preflight import flag, refusals_of, storage_refusals
from sglang_indexcache.sglang.meaning import SOURCES, Meaning
from sglang_indexcache.sglang.probes import SglangSource

_FIRST = (REFUSED, UNJUDGED)
_ASSUMED = (
    "note: taken for a DSA model, since neither a pattern file nor a config.json at hand says what it is; with another"
    " one, other flags are refused"
)
_QUIET_LEVELS = ("warning", "warn", "error", "critical", "fatal")


@dataclass(frozen=True)
class Judgement:
    """Judgement of a launch.

    Attributes:
        proven: what is proven before a request of a user is served.
        verdicts: of each thing that it asks for, the refused first.
        notes: how the line was read, and what of us can't be seen with it.
    """

    proven: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """Problems: what SGLang or the plugin would refuse, and what can't be judged, one line each."""
        found = [verdict for verdict in self.verdicts if verdict.state in (REFUSED, UNJUDGED)]
        return [verdict.why if verdict.state == REFUSED else verdict.line for verdict in found]

    @property
    def lines(self) -> list[str]:
        """Lines for people about what is no problem."""
        known = (verdict.line for verdict in self.verdicts if verdict.state in (RAN, NOT_RUN))
        return [self.proven, *self.notes, *known]


def judge(
    pattern: Pattern,
    family: Family | None,
    readings: Readings,
    *,
    shard: bool = False,
    variables: Mapping[str, str] | None = None,
    source: SglangSource | None = None,
) -> Judgement:
    """Judge a launch line, as each SGLang that it may be meant for reads it.

    Args:
        pattern: the pattern to serve.
        family: the model's family; where nothing says it, DSA, and a note says that.
        readings: of the launch line.
        shard: whether indexers are shared out.
        variables: environment variables of the server.
        source: the SGLang at hand, which says what keys of HiCache storage are made of; `None` without one.
    """
    assumed = () if family is not None else (_ASSUMED,)
    family, read_by = family or DSA, dict[Verdict, list[str]]()
    for line in readings.lines:
        for verdict in verdicts(pattern, family, line, shard=shard, variables=variables, source=source):
            read_by.setdefault(verdict, []).append(line.version)
    every = [line.version for line in readings.lines]
    found = []
    for item, by in _alike(read_by).items():
        some = [version for version in every if version in by]
        found.append(item if some == every else _of(item, some))
    proven = dict.fromkeys(proven_first(line, family) for line in readings.lines)
    found.sort(key=lambda item: _FIRST.index(item.state) if item.state in _FIRST else len(_FIRST))
    return Judgement("; or ".join(proven), tuple(found), (*_notes(readings), *assumed))


def verdicts(
    pattern: Pattern,
    family: Family,
    arguments: Any,
    *,
    shard: bool = False,
    variables: Mapping[str, str] | None = None,
    source: SglangSource | None = None,
) -> Iterator[Verdict]:
    """Yield what is known of all that a launch asks for, the refused first; nothing given is left out.

    Args:
        pattern: the pattern to serve.
        family: the model's family.
        arguments: SGLang's server arguments, or a launch line.
        shard: whether indexers are shared out.
        variables: environment variables of the server.
        source: the SGLang at hand, see `judge`.
    """
    meant, variables = Meaning(arguments), variables or {}
    line = arguments if isinstance(arguments, LaunchLine) else LaunchLine()
    refused = dict(refusals_of(pattern, family, meant, shard, variables))
    if source is not None and not (pattern.is_full and not shard):
        refused |= dict(storage_refusals(source, arguments))
    if line.use_ray:
        refused["--use-ray"] = f"--use-ray {NOT_COMBINED}: Ray actors of SGLang load no plugins"
    for name, why in refused.items():
        yield Verdict(REFUSED, name, why + _as_written(name, line))
    for item in (*COMBINATIONS, *family.sglang.combinations()):
        asked, default = item.asked(meant), item.default(line, family)
        if (asked or default) and not any(name in flags.split() for name in refused for flags in item.flags):
            yield _on(item, "" if asked else default, pattern, family, shard)
    for name in line.given:
        if not _is_judged(name, line, meant, family) and flag(name) not in refused:
            yield Verdict(NOT_RUN, _words(name, line), "")
    for unread in line.unread:
        yield Verdict(UNJUDGED, unread.name, unread.why)
    for name in environment.touching(variables):
        ran = environment.RAN.get(name, "")
        yield Verdict(RAN if ran else NOT_RUN, name, ran)


def family_in(spec: PatternSpec, model: str | None = None) -> Family | None:
    """Return the family that a pattern file was made for, or that of a model in a folder; `None` if nothing says it."""
    if spec.file is not None:
        return family_of(spec.file.model.architecture)
    if model is not None and Path(model, "config.json").is_file():
        with suppress(IndexCacheError):  # whoever reads the model to serve it says why
            return Checkpoint.read(model).family
    return None


def proven_first(arguments: Any, family: Family = DSA) -> str:
    """Return one line that says what is proven of these server arguments before a request of a user is served."""
    meant, always = Meaning(arguments), "proven before it serves: role"
    if type(family.sglang).attentions is SglangAdapter.attentions:
        return f"{always} of every layer and rank; nothing is counted, since these models have no indexers"
    drafts = kinds_of(meant, draft=True) if drafts_of(meant) and family is not DEEPSEEK_V4 else frozenset()
    counted = f"{always} and weights of every layer and rank; counted in {{}}"
    kinds = f"{', '.join(sorted(kinds_of(meant) | drafts))} passes"
    if meant.skip_server_warmup:
        return counted.format(f"the first {kinds} of users' requests, since --skip-server-warmup is given")
    return counted.format(kinds)


def _on(item: Combination, default: str, pattern: Pattern, family: Family, shard: bool) -> Verdict:
    """Return the verdict of a feature that is on for this pattern and family."""
    found = item.verdict
    compared = family.name == item.family and not pattern.indexers and not shard
    if found.state == RAN and not compared:
        found = Verdict(NOT_RUN, item.name, f"compared with F and S on DSA models alone: {item.ran}")
    return replace(found, why="; ".join(filter(None, (default, found.why))))


def _is_judged(name: str, line: LaunchLine, meant: Meaning, family: Family) -> bool:
    """Return whether a flag that was given changes nothing of attention, or is what a combination speaks of."""
    if name in HARMLESS or name in line.plain:
        return True
    own = family.sglang.combinations()
    for meaning in [meaning for meaning, sources in SOURCES.items() if name in sources] or [name]:
        said, its_own = getattr(meant, meaning), [item for item in own if meaning in item.reads]
        if said is None or (said in PLAIN.get(meaning, ()) and not its_own):
            continue
        readers = (*its_own, *(item for item in COMBINATIONS if meaning in item.reads))
        if not any(item.asked(meant) for item in readers):
            return False
    return True


def _words(name: str, line: LaunchLine) -> str:
    """Return a flag as it was written with a short value, and its full name where that is another."""
    written, full, value = line.spelled.get(name, flag(name)), flag(name), line.given[name]
    short = isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) < 30
    known = written in (full, flag(f"no_{name}"))
    return f"{written}{f' {value}' if short else ''}" + ("" if known else f", which is {full}")


def _as_written(name: str, line: LaunchLine) -> str:
    """Return how the flag of a refusal was written, if otherwise."""
    attribute = name.removeprefix("--").replace("-", "_")
    written = [line.spelled[source] for source in SOURCES.get(attribute, (attribute,)) if source in line.spelled]
    return f" (given as {', '.join(written)})" if written and name not in written else ""


def _of(verdict: Verdict, read_by: Sequence[str]) -> Verdict:
    """Return a verdict that only some of the versions lead to, with their names."""
    return replace(verdict, why="; ".join(filter(None, (verdict.why, f"with SGLang {_range(read_by)}"))))


def _alike(read_by: Mapping[Verdict, list[str]]) -> dict[Verdict, list[str]]:
    """Join what could not be judged for other reasons in other versions: the newest one's reason is given."""
    last = {item.name: item for item in read_by if item.state == UNJUDGED}
    joined: dict[Verdict, list[str]] = {}
    for item, by in read_by.items():
        joined.setdefault(last[item.name] if item.state == UNJUDGED else item, []).extend(by)
    return joined


def _range(found: Sequence[str]) -> str:
    """Return versions of the table in words: `0.5.11 to 0.5.17, 0.5.23`."""
    known = versions()
    runs: list[list[str]] = []
    for version in found:
        follows = runs and version in known and runs[-1][-1] in known
        if follows and known.index(version) == known.index(runs[-1][-1]) + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _notes(readings: Readings) -> tuple[str, ...]:
    notes, line = [f"note: {readings.doubt}"] if readings.doubt else [], readings.lines[-1]
    if readings.others:
        names = ", ".join(dict.fromkeys(unread.name for found in readings.others.values() for unread in found))
        notes.append(
            f"note: read as SGLang {_range([item.version for item in readings.lines])} does:"
            f" {_range(list(readings.others))} would not read {names}"
        )
    level = str(line.log_level or "").lower()
    if level in _QUIET_LEVELS:
        notes.append(
            f"note: --log-level {level} hides the lines in which the server says what was proven and counted;"
            " expected info, or ask it: indexcache-check PATTERN --server URL"
        )
    return tuple(notes)
