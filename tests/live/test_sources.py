"""The installed SGLang is one whose source was read, for everything that it has."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from indexcache_launch.environment import all_features
from sglang_indexcache.sglang.probes import SglangSource
from sglang_indexcache.sglang.read_sources import RAN

pytestmark = pytest.mark.sglang


def test_what_is_replaced_was_read() -> None:
    source = SglangSource.installed()
    assert source is not None and source.version in RAN
    replacing = [feature for feature in all_features() if feature.reads and source.refusal(feature) is None]
    assert len(replacing) >= 7 and {feature.name: source.unread(feature) for feature in replacing} == {
        feature.name: None for feature in replacing
    }
