"""Files that `-m newest` and `-m sglang` leave unimported have no test of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import NEWEST, left_out


@pytest.mark.parametrize("marker", ["newest", "sglang"])
def test_no_marked_test_is_left_out(marker: str, request: pytest.FixtureRequest) -> None:
    """Of all tests that are collected with this one, however they got the marker."""
    marked = {item.path for item in request.session.items if item.get_closest_marker(marker)}
    assert not {path.name for path in marked if left_out(path, marker)}


def test_what_names_no_marker_is_left_out(tmp_path: Path) -> None:
    plain, marked, listed = (tmp_path / f"{name}.py" for name in ("test_plain", "test_marked", NEWEST[0]))
    for path in (plain, listed):
        path.write_text("def test() -> None: ...\n")
    marked.write_text("pytestmark = [pytest.mark.sglang, pytest.mark.slow]\n")
    assert [left_out(path, "newest") for path in (plain, marked, listed)] == [True, True, False]
    assert [left_out(path, "sglang") for path in (plain, marked, listed)] == [True, False, True]
