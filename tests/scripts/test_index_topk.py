"""Another index_topk on a loaded model is the one of a model that was built with it, and is put back."""

from __future__ import annotations

from scripts.bench.search.index_topk import behind, selecting
from sglang_indexcache import Pattern
from tests.conftest import TOPK, random_tokens, tiny_config, tiny_engine

PATTERN, DATA = Pattern("FSSFSS"), random_tokens()


def test_another_size_is_that_of_a_model_that_was_built_with_it() -> None:
    own, larger = (tiny_engine(tiny_config(index_topk=topk)) for topk in (TOPK, 2 * TOPK))
    [before], [expected] = (list(engine.evaluate([PATTERN], DATA, "nll")) for engine in (own, larger))
    assert selecting(own, PATTERN, 2 * TOPK, DATA).losses == expected.losses != before.losses
    assert selecting(own, PATTERN, TOPK, DATA).losses == before.losses
    [after] = own.evaluate([PATTERN], DATA, "nll")
    assert after.losses == before.losses


def test_what_is_behind_counts() -> None:
    scored = behind(DATA, 2 * TOPK).scored
    assert not scored[:, : 2 * TOPK + 1].any() and scored[:, 2 * TOPK + 1 :].all()
