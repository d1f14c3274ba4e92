"""The definition. There is nothing beside it: zeros that lie scattered save multiply-adds, not time (README.md)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_kernels.errors import KernelInputError


def kept_keys(k: Tensor, threshold: float | Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply a threshold to keys, number by number: keep a key's own where it moved away, else the one kept before.

    kept[t] = k[t] where |k[t] - kept[t-1]| > threshold, else kept[t-1] (equations 2 and 3 of DeltaLLM). The first key
    is kept whole. With threshold 0 every number is kept as it is.

    Args:
        k: `[..., L, D]`, keys in the order of their tokens, as attention uses them (rotated).
        threshold: at least 0; a tensor that broadcasts to `[..., D]` has one for each number of a key.
        before: `[..., D]`, what was kept of the key before the first one, where these go on from others.

    Returns:
        The kept keys `[..., L, D]`, and where they moved, bool, likewise: elsewhere the difference is zero.

    Raises:
        KernelInputError: if there is no key, or a threshold is below 0 or NaN.
    """
    if k.ndim < 2 or not k.shape[-2]:
        raise KernelInputError(f"k is {list(k.shape)}, expected [..., L, D] with a key")
    limit = torch.as_tensor(threshold, dtype=k.dtype, device=k.device)
    if not bool((limit >= 0).all()):
        raise KernelInputError(f"threshold is {threshold}, expected at least 0")
    kept, moved = torch.empty_like(k), torch.empty(k.shape, dtype=torch.bool, device=k.device)
    for token, key in enumerate(k.unbind(-2)):
        moves = (
            torch.ones_like(key, dtype=torch.bool) if before is None else ~((key - before).abs() <= limit)
        )  # NaN, too
        before = key if before is None else torch.where(moves, key, before)
        kept[..., token, :], moved[..., token, :] = before, moves
    return kept, moved


def differences(kept: Tensor, before: Tensor | None = None) -> Tensor:
    """Subtract from each kept key the one before, but for the first, as DeltaLLM's cache holds them: `[..., L, D]`."""
    first = kept[..., :1, :] if before is None else kept[..., :1, :] - before[..., None, :]
    return torch.cat([first, kept.diff(dim=-2)], dim=-2)


def delta_scores(q: Tensor, delta: Tensor) -> Tensor:
    """Multiply queries with kept keys from the differences alone: a running sum over keys (equation 4).

    Args:
        q: `[..., T, D]`.
        delta: `[..., L, D]`, see `differences`, from the first key on.

    Returns:
        `[..., T, L]`: `q @ kept.mT` up to rounding.
    """
    return (q @ delta.mT).cumsum(-1)


def multiply_adds(moved: Tensor, positions: Tensor, exact_from: Tensor) -> Tensor:
    """Count the multiply-adds of a query's products with its keys, for one head of queries.

    A key that a query sees as it was costs one for each of its numbers; one before `exact_from` only for those that
    moved, since the rest of its product is that of the key before.

    Args:
        moved: `[..., L, D]`, bool, see `kept_keys`.
        positions: `[T]`, int64: each query's own key, the last one that it sees.
        exact_from: `[T]`, int64: the first key that it sees as it was; `positions + 1` for none.

    Returns:
        `[..., T]`, int64.

    Raises:
        KernelInputError: if a query's keys are not there.
    """
    *_, keys, dim = moved.shape
    if bool(((exact_from < 0) | (exact_from > positions + 1) | (positions >= keys)).any()):
        raise KernelInputError(f"exact_from and positions name keys that are not among the {keys}")
    before = F.pad(moved.sum(-1).cumsum(-1), (1, 0))  # [..., L + 1]: of all keys before each
    return before[..., exact_from] + (positions + 1 - exact_from) * dim
