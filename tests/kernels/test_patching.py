"""Changing a running module, and undoing it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from indexcache_kernels.patching import replaced


def test_what_stood_there_stands_there_again() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = module[0]
    inner.forward = first = lambda x: x + 1  # type: ignore[method-assign]
    with (
        pytest.raises(KeyError),
        replaced((inner, "forward", lambda x: x * 0), (inner, "forward", lambda x: x * 3), (module, "weight", 7)),
    ):
        assert torch.equal(inner(torch.ones(2)), torch.full((2,), 3.0)) and module.weight == 7
        raise KeyError
    assert inner.__dict__["forward"] is first and "weight" not in vars(module)


def test_a_submodule_is_hidden_and_comes_back() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.part = part = nn.Linear(2, 2)
    with replaced((module, "part", part.weight.sum)):
        assert module.part == part.weight.sum and "part.weight" in dict(module.named_parameters())
    assert module.part is part


def test_nothing_stays_when_a_place_can_not_be_changed() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(TypeError), replaced((module, "extra", 1), (3, "extra", 1)):
        pass
    assert "extra" not in vars(module)
