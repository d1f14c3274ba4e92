"""Read a safetensors file once: its tensors, in memory of this process, and the digest of its bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_indexcache.io.atomic import opened
from sglang_indexcache.io.digest import CHUNK, Digest, Stamp, check_same
from sglang_indexcache.io.errors import FileError

_MAX_HEADER_BYTES = 100 << 20

# PyTorch's dtypes by their names in safetensors.
TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),  # since PyTorch 2.7
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorFile:
    """Contents of one file.

    Attributes:
        tensors: by name; independent of later changes to the file.
        types: their dtypes as the file writes them, by name.
        digest: digest of all bytes.
    """

    tensors: dict[str, Tensor]
    types: dict[str, str]
    digest: Digest


def read_tensors(path: Path, stop: Event | None = None) -> TensorFile:
    """Read and digest a whole safetensors file; `stop` ends that when it is set, see `side_by_side`.

    Raises:
        FileError: if it can't be read, is no safetensors file, or changes meanwhile.
    """
    with opened(path) as file:
        stamp, digest = Stamp.of(os.fstat(file.fileno())), hashlib.sha256()

        def take(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
            """Read the next bytes into both the result and the digest."""
            content = np.empty(count, np.uint8)
            view, at = content.data, 0
            while at < count:
                if stop is not None and stop.is_set():
                    raise FileError(f"{path}: nobody waits for it any more")
                read = file.readinto(view[at : at + CHUNK])
                if not read:
                    raise FileError(f"{path}: is cut off, {count - at} bytes are missing")
                digest.update(view[at : at + read])
                at += read
            return content

        if stamp.size < 8:
            raise FileError(f"{path}: not a safetensors file")
        size = int.from_bytes(take(8).tobytes(), "little")
        if not 2 <= size <= min(_MAX_HEADER_BYTES, stamp.size - 8):
            raise FileError(f"{path}: not a safetensors file, or cut off")
        places = _places(take(size).tobytes(), stamp.size - 8 - size, path)
        data = torch.from_numpy(take(stamp.size - 8 - size))
        check_same(file, path, stamp)
    tensors = {name: _tensor(data, *place) for name, place in places.items()}
    return TensorFile(tensors, {name: place[0] for name, place in places.items()}, Digest(digest.hexdigest(), stamp))


_Place = tuple[str, list[int], int, int]  # type, shape, first byte, end byte (exclusive)


def _places(header: bytes, data_bytes: int, path: Path) -> dict[str, _Place]:
    """Parse where each tensor lies; refuse gaps, overlaps, and an end other than the file's."""
    try:
        content = json.loads(header, object_pairs_hook=_once)
        content.pop("__metadata__", None)
        found: dict[str, _Place] = {
            name: (item["dtype"], [*map(int, item["shape"])], *map(int, item["data_offsets"]))
            for name, item in content.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise FileError(f"{path}: not a safetensors file") from None
    at = 0
    for name, (kind, shape, first, last) in sorted(found.items(), key=lambda item: item[1][2:]):
        if kind not in TYPES:
            raise FileError(f"{path}: {name} is {kind!s:.20}, expected one of {', '.join(TYPES)}")
        if first != at or min(shape, default=0) < 0 or last - first != math.prod(shape) * TYPES[kind].itemsize:
            raise FileError(f"{path}: not a safetensors file: {name} does not lie where its shape says")
        at = last
    if at > data_bytes:
        raise FileError(f"{path}: is cut off, {at - data_bytes} bytes are missing")
    if at < data_bytes:
        raise FileError(f"{path}: {data_bytes - at} bytes too many stand behind the last tensor")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; refuse duplicate keys."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


def _tensor(data: Tensor, kind: str, shape: list[int], first: int, last: int) -> Tensor:
    piece = data[first:last]
    if first % TYPES[kind].itemsize:
        piece = piece.clone()
    return piece.view(TYPES[kind]).view(shape)
