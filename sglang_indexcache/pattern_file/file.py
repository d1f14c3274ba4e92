"""The pattern file: a small YAML file that people review in git and engines are started with."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_indexcache.io import strict_yaml
from sglang_indexcache.io.atomic import read_regular, write_atomically
from sglang_indexcache.io.errors import FileError, IndexCacheError, PatternError, PatternFileError, is_hidden, one_line
from sglang_indexcache.io.fields import Count, Finite
from sglang_indexcache.model.config_keys import differing, facts_digest
from sglang_indexcache.model.layers import ModelLayers
from sglang_indexcache.pattern import Pattern, full_layer_count, parse_retention
from sglang_indexcache.pattern.indexer_setting import DEFINITION
from sglang_indexcache.pattern.selection import PatternSelection, RegisteredSelection
from sglang_indexcache.pattern_file.remote import SUFFIXES, remote_file

SCHEMA = "indexcache/v1"

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Layers = Annotated[tuple[Count, ...], Field(strict=False)]
_Names = Annotated[tuple[str, ...], Field(strict=False)]
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


class _FileSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(_FileSection):
    """The model that the pattern was found for."""

    architecture: str = Field(description="as in config.json, for instance GlmMoeDsaForCausalLM")
    num_layers: int = Field(ge=1, description="layers that can choose, NextN/MTP layers not counted")
    config_sha256: _Sha256 | None = Field(
        default=None,
        description="digest of config; in files without one, of config.json itself; only published patterns have none",
    )
    name: str = Field(description="hub id or folder name, for people")
    locked_layers: _Layers = Field(default=(), description="layers shared in the checkpoint: they can't be F")
    config: dict[str, Any] | None = Field(
        default=None, description="what config.json says beyond its architecture's defaults that changes the model"
    )

    @classmethod
    def of(cls, model: ModelLayers) -> Self:
        """Return the section of a pattern file for `model`."""
        return cls(
            architecture=model.architecture,
            num_layers=model.num_layers,
            config_sha256=model.config_sha256,
            name=model.name,
            locked_layers=model.locked,
            config=dict(model.config),
        )

    def check(self, model: ModelLayers) -> None:
        """Check that this is the section of `model`.

        Raises:
            PatternFileError: if architecture, depth, locked layers or what config.json says differ, naming the keys.
        """
        for field, value, expected in (
            ("architecture", self.architecture, model.architecture),
            ("num_layers", self.num_layers, model.num_layers),
            ("locked_layers", list(self.locked_layers), list(model.locked)),
        ):
            if value != expected:
                raise PatternFileError(f"model.{field}: file has {value}, {model.name} has {expected}")
        if self.config_sha256 in (None, model.config_sha256, model.earlier_sha256):
            return
        found = list(differing(self.config or model.config, model.config, "the file", model.name))
        if found:
            more = f" and {len(found) - 8} more" if len(found) > 8 else ""
            raise PatternFileError(f"model.config: {'; '.join(found[:8])}{more}; expected a file made for this model")
        added = ", ".join(model.redundant[:12]) + (", ..." if len(model.redundant) > 12 else "")
        raise PatternFileError(
            f"model.config_sha256: file has {self.config_sha256}, {model.name} has {model.earlier_sha256}; expected the"
            " config.json that the file was made with, or a file made again: this one is of a version that does not say"
            f" which keys it saw (a copy that another program saved may have more, such as {added})"
        )


class TrajectoryStep(_FileSection):
    """One layer flipped from F to S."""

    layer: Count = Field(description="the layer, counted from 0")
    pattern_loss: Finite = Field(description="objective after the flip")
    stderr: Annotated[Finite, Field(ge=0)] | None = Field(
        default=None, description="paired standard error of its increase over baseline_loss"
    )


class PrefillSection(_FileSection):
    """The time of prompts within which a search found `pattern`."""

    share: Annotated[Finite, Field(gt=0, le=1)] = Field(description="of the time with the checkpoint's own pattern")
    context: Count = Field(description="tokens of the prompts")
    prices: str = Field(description="name of the latency table")


class BytesSection(_FileSection):
    """The bytes within which a search found `pattern`."""

    share: Annotated[Finite, Field(gt=0, le=1)] = Field(description="of what a decode step reads with all layers D")
    context: Count = Field(description="tokens in the cache")


class SearchSection(_FileSection):
    """The search that found the pattern."""

    strategy: str
    objective: str
    baseline_loss: Finite = Field(description="objective with the checkpoint's own pattern")
    loss: Finite = Field(description="objective with `pattern`")
    evaluations: Count = Field(description="patterns evaluated by the strategy, baseline not counted")
    evaluated_sequences: Count | None = Field(
        default=None, description="runs of one sequence under one pattern, baseline counted: what the search cost"
    )
    seed: int
    blocks: Annotated[int, Field(ge=1)] = 1
    noise_floor: Finite = Field(description="difference of two evaluations of the baseline")
    prefill: PrefillSection | None = Field(
        default=None, description="the time for which `pattern` was found; it need not be on the trajectory then"
    )
    bytes: BytesSection | None = Field(default=None, description="likewise the bytes for which it was found")

    @property
    def within(self) -> bool:
        """True if `pattern` was found within a time or bytes, beside the trajectory."""
        return self.prefill is not None or self.bytes is not None


class CalibrationSection(_FileSection):
    """The text that the patterns were evaluated on."""

    sources: _Names
    sha256: _Sha256 = Field(description="digest of the token stream")
    sequences: Count
    seq_len: Count = Field(description="tokens")
    scored_tokens: Count
    sketch: Annotated[str, Field(pattern=_BASE64, max_length=8192)] | None = Field(
        default=None, description="which text this was, so that indexcache-eval can leave it out of held-out sets"
    )


class PublishedSection(_FileSection):
    """Source of a pattern that somebody else published; it was neither searched nor measured by this project."""

    by: str = Field(description="who published it")
    source: str = Field(description="where: an address, or a repository, with what is said there about its search")
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] = Field(description="of the publication")
    verified: Literal[False] = Field(description="false: nobody measured here what it loses")

    def __str__(self) -> str:
        return f"published by {self.by}, not verified here"


class PatternFile(_FileSection):
    """A pattern with what a reviewer needs to trust it. Read by `PatternFile.load("deploy/glm5/pattern.yaml")`."""

    model_config = ConfigDict(defer_build=True)  # the type of `selection` is registered by an extension

    schema_: Literal["indexcache/v1"] = Field(alias="schema")
    model: ModelSection
    selection: Annotated[PatternSelection, RegisteredSelection] | None = Field(
        default=None, description="of dense models: the pages that F and S layers attend to; letters are D, F and S"
    )
    pattern: str = Field(
        description="one letter per layer; F runs its indexer, or with a selection D attends to everything; S reuses"
        " the last choice before it. Behind them +6q16: layer 6 selects for 16 prompt queries at a time"
    )
    block_definition: int | None = Field(
        default=None, description="which definition of +6q16 is meant, 2; only beside patterns with it"
    )
    retention: Finite = Field(description="share of layers that are not shared, as a decimal")
    patterns: dict[str, str] = Field(default_factory=dict, description="other patterns by retention, e.g. 1/4")
    trajectory: Annotated[tuple[TrajectoryStep, ...], Field(strict=False)] = Field(
        default=(), description="layers in the order in which they became S: one file serves any retention"
    )
    search: SearchSection | None = None
    calibration: CalibrationSection | None = None
    published: PublishedSection | None = Field(
        default=None, description="of a pattern that others published, in the place of search and calibration"
    )
    versions: dict[str, str] = Field(default_factory=dict)
    created: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        model = self.model
        try:
            own = self.as_pattern()
        except PatternError as error:
            raise PatternError(f"pattern: {error}") from None
        if self.published is None and model.config_sha256 is None:
            raise PatternError("model.config_sha256: missing, expected the digest, or published: who published this")
        if self.published is not None and (self.search is not None or self.calibration is not None):
            raise PatternError("published: stands beside search or calibration, expected one of the two")
        if model.config is not None and facts_digest(model.architecture, model.config) != model.config_sha256:
            raise PatternError("model.config_sha256: is not that of model.config, expected both as they were written")
        outside = [layer for layer in model.locked_layers if not 1 <= layer < model.num_layers]
        if outside:
            raise PatternError(f"model.locked_layers: found {outside[0]}, expected 1 to {model.num_layers - 1}")
        own.check_fits(model.num_layers, model.locked_layers)
        if abs(own.retention - self.retention) > 0.0005:
            raise PatternError(
                f"retention: found {self.retention}, but pattern keeps {own.retention:.4f} of its layers"
            )
        known = [pattern.letters for pattern in self.trajectory_patterns()]
        for name, letters in self.patterns.items():
            pattern = Pattern.parse(letters, self.selection)
            pattern.check_fits(model.num_layers, model.locked_layers)
            if name != str(parse_retention(name)):
                raise PatternError(f"patterns.{name}: expected {parse_retention(name)}, the one way to write it")
            expected = full_layer_count(model.num_layers, parse_retention(name))
            if pattern.indexer_cost > expected or (not pattern.indexers and len(pattern.full_layers) < expected):
                kept = f"{pattern.indexer_cost:.4g}"
                raise PatternError(
                    f"patterns.{name}: found {kept} {pattern.full_role} layers, expected {expected} of"
                    f" {model.num_layers}"
                )
            known.append(letters)
        definition = DEFINITION if any("+" in letters for letters in (self.pattern, *known)) else None
        if self.block_definition not in (None, definition):
            raise PatternError(f"block_definition: found {self.block_definition}, expected {definition or 'none'}")
        vars(self)["block_definition"] = definition
        within = self.search is not None and self.search.within
        if (self.trajectory or self.patterns) and self.pattern not in known and not within:
            raise PatternError("pattern: is neither a step of trajectory nor one of patterns, expected one of them")
        return self

    def as_pattern(self) -> Pattern:
        """Return the default pattern."""
        return Pattern.parse(self.pattern, self.selection)

    def trajectory_patterns(self) -> list[Pattern]:
        """Return the nested patterns of the search, from the checkpoint's own to the last step's.

        Raises:
            PatternError: if a step flips a layer that is not `F` any more.
        """
        patterns = [Pattern.full(self.model.num_layers, self.model.locked_layers, self.selection)]
        for number, step in enumerate(self.trajectory):
            try:
                patterns.append(patterns[-1].share(step.layer))
            except PatternError as error:
                raise PatternError(f"trajectory[{number}]: {error}") from None
        return patterns

    def pattern_at(self, retention: Fraction) -> Pattern:
        """Return the pattern for `retention`: from `patterns`, else the step of the trajectory with as many F layers.

        Raises:
            PatternError: if the file has none.
        """
        if str(retention) in self.patterns:
            return Pattern.parse(self.patterns[str(retention)], self.selection)
        full_layers = full_layer_count(self.model.num_layers, retention)
        steps = self.trajectory_patterns() if self.trajectory else [self.as_pattern()]
        for pattern in steps:
            if len(pattern.full_layers) == full_layers:
                return pattern
        counts = sorted({len(pattern.full_layers) for pattern in steps})
        reach = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
        total = self.model.num_layers
        raise PatternError(
            f"retention {retention} keeps {full_layers} of {total} layers {steps[0].full_role}, but the file has"
            f" patterns with {reach}"
        )

    # -- reading and writing

    @classmethod
    def load(cls, spec: str | Path) -> PatternFile:
        """Read `PATH` or `PATH@RETENTION`, for instance `deploy/glm5/pattern.yaml@1/4`; also of the hub.

        Raises:
            PatternFileError: one line with file, field, what was found and what would be right.
        """
        path, retention = split_retention(str(spec))
        remote = remote_file(str(path))
        name, local = (path, path) if remote is None else remote.download()
        try:
            data = read_regular(local, strict_yaml.MAX_BYTES)
        except FileError as error:
            raise PatternFileError(str(error)) from None
        file = cls.loads(data, str(name))
        if retention is None:
            return file
        try:
            pattern = file.pattern_at(parse_retention(retention))
        except PatternError as error:
            raise PatternFileError(f"{spec}: {error}") from None
        return file.model_copy(update={"pattern": pattern.letters, "retention": pattern.retention})

    @classmethod
    def loads(cls, data: bytes | str, source: str = "pattern file") -> PatternFile:
        """Parse YAML; `source` names it in errors.

        Raises:
            PatternFileError: as `load`.
        """
        try:
            content = strict_yaml.load(data if isinstance(data, bytes) else data.encode())
            if not isinstance(content, dict):
                kind = type(content).__name__
                raise PatternFileError(f"found {kind}, expected a mapping that begins with schema: {SCHEMA}")
            file = cls.model_validate(content)
            if file.block_definition is not None and "block_definition" not in content:
                raise PatternFileError(
                    f"block_definition: missing, and +6q16 has another meaning since version 0.2.0; expected"
                    f" {DEFINITION} once the pattern was searched or measured again"
                )
            return file
        except ValidationError as error:
            raise PatternFileError(f"{source}: {_first_error(error)}") from None
        except IndexCacheError as error:
            raise PatternFileError(f"{source}: {error}") from None

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the file, for editors; `pattern_file.schema.json` in the package is a copy."""
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema(by_alias=True)}

    def dumps(self) -> str:
        """Return the file's text; `loads` gives back an equal object."""
        content = self.model_dump(by_alias=True, exclude_defaults=True, mode="json")
        if "config" in content["model"]:
            content["model"]["config"] = _Inline(content["model"]["config"])
        content = {"schema": SCHEMA, **{key: value for key, value in content.items() if key != "schema"}}
        if "selection" in content:
            content["selection"] = _Inline(content["selection"])
        if "trajectory" in content:
            content["trajectory"] = [_Inline(step) for step in content["trajectory"]]
        text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=2**20, allow_unicode=True)
        # `_Dumper` has put quotes around strings with letters that don't show, but writes the letters as they are
        return "".join(f"\\U{ord(letter):08x}" if is_hidden(letter) and letter != "\n" else letter for letter in text)

    def save(self, path: str | Path) -> None:
        """Write the file, all of it or nothing."""
        write_atomically(Path(path), self.dumps())


def split_retention(spec: str) -> tuple[Path, str | None]:
    """Split `PATH@RETENTION`; a file whose own name holds the `@` goes before, as does `org/name@REVISION/p.yaml`."""
    head, mark, tail = spec.rpartition("@")
    if mark and head and not tail.endswith(SUFFIXES) and not os.path.exists(spec):  # noqa: PTH110 (Path.exists raises for names that are too long)
        return Path(head), tail
    return Path(spec), None


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    where = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", where)
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: unknown key"
    if first["type"] == "missing":
        return f"{where}: missing"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, IndexCacheError):
        return f"{where}: {cause}" if where else str(cause)
    value = one_line(repr(first["input"]), 60)
    return f"{where or 'the file'}: found {value}, expected: {first['msg'].removeprefix('Input should be ')}"


class _Inline(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """A dumper whose output `strict_yaml` reads back: it quotes strings that would be numbers there, or don't show."""

    def represent_text(self, text: str) -> yaml.Node:
        try:
            plain = strict_yaml.resolve(text) == text
        except PatternFileError:
            plain = False
        style = None if plain and not any(map(is_hidden, text)) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(
    _Inline, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)
)
