"""The definitions, in PyTorch."""

from __future__ import annotations

from torch import Tensor

from indexcache_kernels.errors import KernelInputError

CHUNK, STRIDE = 32, 16  # tokens of a compressed key, and from one to the next


def compress_keys(k: Tensor) -> Tensor:
    """Average 32 keys at a time, 16 tokens apart (InfLLM-V2; NOSA, arXiv 2510.13602).

    Args:
        k: `[B, G, L, D]`, with their positions in them.

    Returns:
        `[B, G, C, D]`, in the dtype of `k`: the means of those that end within L.

    Raises:
        KernelInputError: if it has another shape.
    """
    if k.ndim != 4:
        raise KernelInputError(f"k is {list(k.shape)}, expected [B, G, L, D]")
    if k.shape[2] < CHUNK:
        return k.new_empty(*k.shape[:2], 0, k.shape[3])
    return k.float().unfold(2, CHUNK, STRIDE).mean(-1).to(k.dtype)


def block_scores(
    q: Tensor, compressed: Tensor, lengths: Tensor, *, scale: float, block_tokens: int, out: Tensor
) -> None:
    """Write into `out`, `[B, N]` or `[B, G, N]`, one request after the other; see the package."""
    for row, length in enumerate(lengths.tolist()):
        chunks = max(0, (length - CHUNK) // STRIDE + 1)
        keys = compressed[row, :, :chunks].float()  # [G, C, D]
        heads = q[row].float().view(len(keys), -1, q.shape[2])  # [G, H / G, D]
        shares = (heads @ keys.mT * scale).softmax(-1).sum(1)  # [G, C]
        for block in range(-(-length // block_tokens)):
            first, end = block * block_tokens // STRIDE - 1, (block + 1) * block_tokens // STRIDE
            touching = shares[:, max(0, first) : end]
            largest = touching.amax(1) if touching.shape[1] else touching.new_zeros(len(keys))  # [G]
            out[row, ..., block] = largest if out.ndim == 3 else largest.sum()
