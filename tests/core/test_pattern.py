"""Patterns: what is one, what is not, and what follows from it."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.messages import BEGINS_SHARED, OTHER_LENGTH
from sglang_indexcache.pattern import full_layer_count, parse_retention, uniform_pattern

ROLES = st.text(alphabet="FS", max_size=90).map(lambda tail: "F" + tail)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("", "pattern is empty"),
        ("SFF", BEGINS_SHARED),
        ("FFs", "'s' for layer 2"),
        ("FF S", "' ' for layer 2"),
        ("F1", "'1' for layer 1"),
        (["F"], "pattern is list"),
        (None, "pattern is NoneType"),
    ],
)
def test_bad_patterns_are_refused(roles: object, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern(roles)  # type: ignore[arg-type]


def test_a_pattern_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Pattern("FS").roles = "FF"  # type: ignore[misc]


@given(ROLES)
def test_source_layers_are_the_nearest_full_layer_at_or_below(roles: str) -> None:
    pattern = Pattern(roles)
    expected = [max(j for j in range(layer + 1) if roles[j] == "F") for layer in range(len(roles))]
    assert list(pattern.source_layers) == expected
    assert sorted([*pattern.full_layers, *pattern.shared_layers]) == list(range(len(roles)))


def test_fingerprint_is_the_sha256_of_the_letters() -> None:
    assert Pattern("FSSS").fingerprint == hashlib.sha256(b"FSSS").hexdigest()
    assert Pattern("FSSS").fingerprint != Pattern("FSSF").fingerprint


@pytest.mark.parametrize(
    ("layers", "keep_every", "expected"),
    [(8, 4, "FSSSFSSS"), (9, 4, "FSSSFSSSF"), (8, 2, "FSFSFSFS"), (5, 1, "FFFFF"), (3, 8, "FSS")],
)
def test_uniform_is_the_papers(layers: int, keep_every: int, expected: str) -> None:
    assert Pattern.uniform(layers, keep_every).roles == expected


@given(st.integers(1, 90), st.integers(1, 10))
def test_all_phases_of_uniform_keep_as_many_layers(layers: int, keep_every: int) -> None:
    phases = [Pattern.uniform(layers, keep_every, phase) for phase in range(keep_every)]
    assert len(phases[0].full_layers) == math.ceil(layers / keep_every)
    for phase, pattern in enumerate(phases):
        assert len(pattern.full_layers) <= len(phases[0].full_layers)
        assert all(layer % keep_every == phase for layer in pattern.full_layers[1:])
        if layers >= keep_every * len(phases[0].full_layers):  # nothing cut off at the end
            assert len(pattern.full_layers) == len(phases[0].full_layers)


def test_uniform_phase_shifts() -> None:
    assert [Pattern.uniform(16, 4, phase).full_layers for phase in range(4)] == [
        (0, 4, 8, 12),
        (0, 1, 5, 9),
        (0, 2, 6, 10),
        (0, 3, 7, 11),
    ]
    with pytest.raises(PatternError, match="phase=4"):
        Pattern.uniform(16, 4, 4)


def test_check_fits_names_length_and_locked_layers() -> None:
    Pattern("FSFS").check_fits(4, locked=[1, 3])
    with pytest.raises(PatternError, match=OTHER_LENGTH.format(4, 5)):
        Pattern("FSFS").check_fits(5)
    with pytest.raises(PatternError, match="F for layer 2, but the checkpoint has no indexer"):
        Pattern("FSFS").check_fits(4, locked=[1, 2])


def test_share_flips_one_full_layer() -> None:
    assert Pattern("FFF").share(1).roles == "FSF"
    for pattern, layer in (("FSF", 1), ("FFF", 3), ("FFF", -1)):
        with pytest.raises(PatternError, match="not an F layer"):
            Pattern(pattern).share(layer)
    with pytest.raises(PatternError, match=BEGINS_SHARED):
        Pattern("FFF").share(0)


def test_unshare_takes_a_flip_back() -> None:
    assert Pattern("FFF").share(1).unshare(1) == Pattern("FFF")
    for layer in (0, 3, -1):
        with pytest.raises(PatternError, match="not an S layer"):
            Pattern("FSF").unshare(layer)


@pytest.mark.parametrize(("text", "value"), [("1/4", Fraction(1, 4)), ("0.25", Fraction(1, 4)), (" 1 ", Fraction(1))])
def test_parse_retention(text: str, value: Fraction) -> None:
    assert parse_retention(text) == value


@pytest.mark.parametrize("text", ["0", "5/4", "-1/2", "1/0", "quarter", "", "nan", "inf"])
def test_bad_retentions_are_refused(text: str) -> None:
    with pytest.raises(PatternError, match="retention is"):
        parse_retention(text)


@pytest.mark.parametrize(("layers", "count"), [(78, 20), (47, 12), (61, 16), (16, 4), (1, 1)])
def test_full_layer_count_rounds_up_as_uniform_does(layers: int, count: int) -> None:
    assert full_layer_count(layers, Fraction(1, 4)) == count == len(Pattern.uniform(layers, 4).full_layers)


def test_neighbours_trade_one_layer_for_another() -> None:
    pattern = Pattern("FFSSF")
    found = {neighbour.roles for neighbour in pattern.neighbours(locked=(3,))}
    assert found == {"FSFSF", "FFFSS"}
    assert len(set(pattern.neighbours())) == 4 and pattern not in set(pattern.neighbours())
    assert not list(Pattern("FFF").neighbours()) and not list(Pattern("FSS").neighbours())


@pytest.mark.parametrize(
    ("native", "retention", "phase", "expected"),
    [
        ("F" * 8, 4, 0, "FSSSFSSS"),
        ("FFFSSSFSSSFSSSFS", 8, 0, "FSSSSSFSSSSSSSSS"),
        ("FFFSSSFSSSFSSSFS", 4, 0, "FSFSSSFSSSFSSSSS"),
        ("FFSSSSSS", 4, 0, "FFSSSSSS"),
        ("FFFSSSSS", 4, 3, "FSFSSSSS"),
    ],
)
def test_uniform_among_locked_layers_keeps_the_nearest(native: str, retention: int, phase: int, expected: str) -> None:
    """GLM-5.2 and 5.3 have an indexer in one layer of four."""
    found = uniform_pattern(Pattern(native), Fraction(1, retention), phase)
    assert found.roles == expected
    found.check_fits(len(native), Pattern(native).shared_layers)


def test_uniform_asks_for_no_more_layers_than_have_an_indexer() -> None:
    with pytest.raises(PatternError, match="uniform 1/2 keeps 4 of 8 layers F, but the checkpoint has indexers for 3"):
        uniform_pattern(Pattern("FFSSFSSS"), Fraction(1, 2))


@pytest.mark.parametrize(
    ("letters", "message"),
    [
        ("FSCF", r"C for layer 2, but C layers \(candidates\) are not supported since version 0.2.0; expected F or S$"),
        ("FSXF", "pattern has 'X' for layer 2, expected F or S$"),
        ("FSfF", "pattern has 'f' for layer 2, expected F or S in capitals"),
        ("FSDF", r"expected F or S \(D needs a selection\)"),
        ("SSFF", BEGINS_SHARED),
    ],
)
def test_what_is_said_of_other_letters(letters: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern.parse(letters)
