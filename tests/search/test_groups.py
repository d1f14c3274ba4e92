"""Groups of settings as one option: what is read, and one line for what is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer

from indexcache_dense.reuse import ReusePolicy
from indexcache_search.cli.bounded import Bounds
from indexcache_search.cli.groups import group
from indexcache_search.errors import SearchError


@dataclass(frozen=True, kw_only=True)
class Kind:
    names: tuple[str, ...] = ()
    count: Annotated[int | None, Bounds(1, 64, "no more are there")] = None
    sizes: tuple[Annotated[int, Bounds(1, 9)], ...] = (1,)
    rate: Annotated[float, Bounds(0, 1)] = 0.5
    check: bool = False
    folder: Path | None = None
    mode: Literal["auto", "naive"] = "auto"
    steps: tuple[ReusePolicy, ...] = ()

    def __post_init__(self) -> None:
        if self.check and not self.count:
            raise SearchError("check needs count")


@dataclass(frozen=True, kw_only=True)
class Needed:
    sizes: tuple[int, ...]
    context: int = 8


@pytest.mark.parametrize(
    ("text", "mapping", "expected"),
    [
        ("count=3", {"count": 3}, Kind(count=3)),
        ("a,b", {"names": ["a", "b"]}, Kind(names=("a", "b"))),
        (
            "a, b:rate=1e-1, count=4",
            {"names": ["a", "b"], "rate": 0.1, "count": 4},
            Kind(names=("a", "b"), rate=0.1, count=4),
        ),
        ("sizes=2/4/8", {"sizes": [2, 4, 8]}, Kind(sizes=(2, 4, 8))),
        ("a:folder=demo:text", {"names": "a", "folder": "demo:text"}, Kind(names=("a",), folder=Path("demo:text"))),
        (
            "steps=none/ema:0.9",
            {"steps": ["none", "ema:0.9"]},
            Kind(steps=(ReusePolicy(), ReusePolicy(policy="ema", beta=0.9))),
        ),
        ("check=yes,count=1,mode=naive", {"check": True, "count": 1, "mode": "naive"}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mapping_gives_the_same_as_words(text: str, mapping: dict[str, Any], expected: Kind | None) -> None:
    found = group(Kind)(text)
    assert found == group(Kind)(mapping) == (expected or Kind(check=True, count=1, mode="naive"))
    assert group(Kind)(found) is found


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("a:count=x", "count: found 'x', expected a whole number"),
        ("count=2.5", "count: found '2.5', expected a whole number"),
        ("count=65", "count: found 65, expected 1 to 64: no more are there"),
        ("sizes=1/0", "sizes: found 0, expected 1 to 9"),
        ("rate=nan", "rate: found nan, expected 0 to 1"),
        ("rate=", "rate: found '', expected one value"),
        ("check=1", "check: found '1', expected yes or no"),
        ("mode=fast", "mode: found 'fast', expected one of auto, naive"),
        ("steps=often", "steps are 'often', expected none"),
        ("check=yes", "check needs count"),
        ("", "names: found '', expected one value"),
        ("count=1,2", "found '2', expected KEY=VALUE"),
        ("count=1,count=2", "count is given twice"),
        ("counts=1", "found 'counts', expected names, count, sizes, rate, check, folder, mode, steps"),
        ({"count": True}, "count: found 'True', expected one value"),
        ({"count": None}, "count: found 'None', expected one value"),
        ({"rate": [0.1]}, "rate: found '[0.1]', expected one value"),
        ({"check": "maybe"}, "check: found 'maybe', expected yes or no"),
        ({"count": 10**400}, "digits), expected 1 to 64"),
    ],
    ids=str,
)
def test_what_is_no_setting_is_one_line(value: Any, line: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        group(Kind)(value)
    message = str(caught.value.message)
    assert line in message and "\n" not in message and len(message) < 200


def test_the_first_may_stand_alone_and_some_must_be_given() -> None:
    assert group(Needed)("4,16:context=9") == group(Needed)("sizes=4/16,context=9") == Needed(sizes=(4, 16), context=9)
    assert group(Needed)("4,16") == Needed(sizes=(4, 16))
    with pytest.raises(typer.BadParameter, match="sizes is missing"):
        group(Needed)("context=9")
    with pytest.raises(typer.BadParameter, match="sizes: found 'a:4', expected a whole number"):
        group(Needed)("a:4")
