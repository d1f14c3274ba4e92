"""The entry points by which `indexcache-check`, the launcher and a search's own server have launch lines judged."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from indexcache_launch import override_alone
from indexcache_launch.environment import Environment
from indexcache_launch.judge import Judgement, family_in, judge
from indexcache_launch.launch_line import LaunchLine, Readings, split_text
from indexcache_launch.options import versions
from sglang_indexcache.checkpoint.findings import Checked, Findings, Launch, Launches, Listing, Remarks
from sglang_indexcache.families.combination import REFUSED, UNJUDGED
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.preflight import unread_features
from sglang_indexcache.sglang.asked import Asked, LaunchError, split_arguments
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import SglangError, SglangSource
from sglang_indexcache.version import requirement


@dataclass(frozen=True)
class ReadLaunch(Launch):
    """A launch line: what it asks of us, the variables in front of it, and how SGLang reads its other words."""

    asked: Asked
    variables: Mapping[str, str]
    readings: Readings
    source: SglangSource | None

    @property
    def arguments(self) -> Any:
        """The flags as the newest SGLang reads them."""
        return self.readings.lines[-1]

    def check(self, checked: Checked, written: str) -> Findings:
        """See `Launch.check`; variables are those in front of the line, not those of this shell."""
        asked, spec, pattern, line = self.asked, checked.spec, checked.pattern, self.readings.lines[-1]
        of_model = None if checked.checkpoint is None or spec.file is not None else checked.checkpoint.family
        said = of_model or family_in(spec, line.model_path)
        found = judge(pattern, said, self.readings, shard=asked.shard, variables=self.variables, source=self.source)
        problems, family, others = found.problems, said or DSA, list[str]()
        if asked.calibrate:
            problems.insert(0, "--server-args starts a calibration server, which serves no pattern")
        elif asked.pattern and asked.pattern not in (spec.text, written):
            problems = [*_another(asked.pattern, checked), *problems]
        if checked.checkpoint is None:  # else the check against the model has judged its override
            wrong, others = override_alone.in_launch_line(
                line,
                pattern,
                family,
                file=spec.file,
                unpacked=checked.unpacked,
                allow_config_mismatch=asked.allow_mismatch,
            )
            problems += wrong
        problems += unread_features(self.source, pattern, family, asked, line)
        return Findings(
            problems=tuple(problems),
            warnings=tuple(others),
            lines=tuple(found.lines),
            content={
                "proven_first": found.proven,
                "launch_notes": list(found.notes),
                "combinations": [asdict(verdict) for verdict in found.verdicts],
            },
        )


def _another(served: str, checked: Checked) -> list[str]:
    """Return one line if a launch line serves another pattern than the one that is checked, or nobody can say."""
    try:
        other = PatternSpec.read(served).known()
    except IndexCacheError as error:
        return [f"could not be judged: the pattern that --server-args serve ({error})"]
    if other == checked.pattern:
        return []
    return [f"--server-args serves {served}, which is another pattern than {checked.spec.text}"]


class LaunchLines(Launches):
    """Launch lines of SGLang."""

    def arguments(self, words: Sequence[str]) -> Any:
        """See `Launches.arguments`."""
        return LaunchLine.parse(words)

    def read(self, text: str, unpacked: Path | None) -> Launch:
        """See `Launches.read`."""
        variables, words = split_text(text)
        ours, rest = split_arguments(words)
        source = SglangSource.at_hand(unpacked)
        return ReadLaunch(ours.beside(variables), variables, Readings.of(rest, source), source)

    def tell(self, spec: PatternSpec, asked: Asked, words: Sequence[str]) -> list[str]:
        """See `Launches.tell`.

        Raises:
            LaunchError: if a flag can't be combined with the pattern.
            ModelConfigError: if the model is a path of nothing.
        """
        pattern, variables = spec.known(), dict(os.environ)  # SGLang sets some while it is imported
        shard, source = asked.beside(variables).shard, SglangSource.installed()

        def judged(importing: bool) -> Judgement:
            readings = Readings.of(words, source, importing)
            model = readings.lines[-1].model_path
            if model is not None and model.startswith(("/", "./", "../")) and not Path(model).exists():
                ModelName.parse(model)  # says what is wrong
            found = judge(pattern, family_in(spec, model), readings, shard=shard, variables=variables, source=source)
            for verdict in found.verdicts:
                if verdict.state == REFUSED:
                    raise LaunchError(verdict.why)
            return found

        if source is not None and source.version in versions():
            judged(importing=False)  # a mistake is answered at once
        found = judged(importing=True)
        return [*found.lines, *(verdict.line for verdict in found.verdicts if verdict.state == UNJUDGED)]

    def alone(self, model: str, overrides: str, unpacked: Path | None) -> Findings:
        """See `Launches.alone`."""
        found = override_alone.of_flag(model, overrides, unpacked)
        return Findings(problems=found.problems, lines=(override_alone.as_text(found),), content=asdict(found))


class Overrides(Remarks):
    """Says what engines would run with a user's overrides alone, without the launcher."""

    def on(self, checked: Checked) -> Findings:
        """See `Remarks.on`."""
        checkpoint, given, roles = checked.checkpoint, checked.overrides, checked.pattern.roles
        if checkpoint is None:
            return Findings()
        readings = (
            override_alone.alone(checkpoint, given, checked.unpacked).readings
            if override_alone.says_roles(given)
            else ()
        )
        source = SglangSource.at_hand(checked.unpacked)
        doubts = override_alone.other_than(readings, source, roles) if readings and checked.merged else ()
        lines = override_alone.reading_lines(readings, roles)
        return Findings(
            warnings=(
                *map(override_alone.without_launcher, doubts),
                *override_alone.contradictions(checkpoint),
            ),
            lines=(f"{FLAG} as it was given, without the launcher:", *lines, "") if readings else (),
            content={"alone": [asdict(item) for item in readings]},
        )


class Features(Listing):
    """The features of this plugin on an SGLang."""

    help = "show what this SGLang offers, feature by feature"
    reads_sglang = True

    def find(self, unpacked: Path | None) -> Findings:
        """See `Listing.find`; a problem if no pattern can be served.

        Raises:
            SglangError: if there is no SGLang.
        """
        source = SglangSource.at_hand(unpacked)
        if source is None:
            raise SglangError(
                f"SGLang is not installed here; expected: pip install {requirement('sglang')}, or --sglang FOLDER"
            )
        found = Environment.of(source)
        text = found.as_text()
        return Findings(problems=() if found.can_serve else (text,), lines=(text,), content=asdict(found))
