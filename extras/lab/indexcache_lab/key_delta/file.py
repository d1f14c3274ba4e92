"""A file of thresholds that a search found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from indexcache_lab.key_delta.plan import KeyPlan
from indexcache_search.data.sketch import Sketch
from indexcache_search.errors import SearchError
from sglang_indexcache import ModelLayers
from sglang_indexcache.io.atomic import read_json_object
from sglang_indexcache.io.errors import PatternFileError
from sglang_indexcache.io.fields import Finite
from sglang_indexcache.pattern_file.file import ModelSection

LIMIT = 1 << 20


class KeyFile(BaseModel):
    """Content of thresholds.json: a threshold for each layer, and measurements on the calibration data.

    Attributes:
        skipped: the requested share of the multiply-adds of queries with keys to leave out.
        measured: the share left out on the calibration data.
        kl: divergence from the unchanged model.
        uniform: the single threshold for all layers that leaves out as much, and its divergence.
        calibration_sha256: digest of the tokens.
        sketch: lets later comparisons recognise the calibration texts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    schema_: Literal["indexcache-keys/v1"] = Field(alias="schema")
    model: ModelSection
    method: Literal["key_delta"]
    thresholds: list[Finite]
    window: Finite
    max_window: int | None
    recent: int
    skipped: Finite
    measured: Finite
    kl: Finite
    uniform: list[Finite]
    calibration_sha256: str
    sketch: str

    @property
    def plan(self) -> KeyPlan:
        """The plan in the file.

        Raises:
            SearchError: if a value is not a threshold.
        """
        return KeyPlan(
            method=self.method,
            values=tuple(self.thresholds),
            window=self.window,
            max_window=self.max_window,
            recent=self.recent,
        )

    def for_model(self, model: ModelLayers) -> KeyPlan:
        """Return the plan if it was made for this model.

        Raises:
            SearchError: if it was not.
        """
        try:
            self.model.check(model)
        except PatternFileError as error:
            raise SearchError(f"the thresholds are of {self.model.name}, not {model.name}: {error}") from None
        return self.plan

    def calibrated_on(self) -> Sketch:
        """Return the sketch of the calibration texts.

        Raises:
            SearchError: if it can't be read.
        """
        try:
            return Sketch.decode(self.sketch)
        except ValueError:
            raise SearchError("sketch can't be read, expected what the search wrote") from None

    @classmethod
    def load(cls, path: Path) -> KeyFile:
        """Read a file.

        Raises:
            SearchError: naming the file and the error.
        """
        try:
            file = cls.model_validate_json(json.dumps(read_json_object(path, LIMIT)))
            file.plan, file.calibrated_on()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise SearchError(f"{path}: {where}: {first['msg']}") from None
        except SearchError as error:
            raise SearchError(f"{path}: {error}") from None
        return file

    def dumps(self) -> str:
        """Return the file's text; `load` returns an equal object."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"
