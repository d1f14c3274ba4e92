"""Carry a model away in pieces of 16 MB, and put it together again.

    python -m scripts.bench.search.weights pieces build/scale/dense --output carried --dtype int8
    python -m scripts.bench.search.weights join carried --output build/dense

`pieces` takes a model's folder, or one in which `train_dense_mla` still trains, of which it takes the last checkpoint:
`train_dense_mla --base build/dense` goes on from there in another session. `int8` has a scale in float32 for each row
of a matrix; vectors stay in bfloat16. What `join` writes is in bfloat16 either way. Files are written once all pieces
are there and have the sha256 of `pieces.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from indexcache_search.errors import FolderError
from indexcache_search.workdir.lock import locked
from sglang_indexcache.io.atomic import write_atomically

PIECE = 16_000_000  # bytes
MANIFEST, SCHEMA = "pieces.json", "indexcache-weights/v1"
WEIGHTS, CHECKPOINT, PROGRESS = "model.safetensors", "checkpoint.pt", "progress.json"
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json", PROGRESS)
SCALE = ".row_scale"


def packed(weights: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return the weights in `dtype`; of `int8`, matrices with a scale for each row beside them."""
    found = {}
    for name, item in weights.items():
        if dtype == "bf16" or item.dim() < 2:
            found[name] = item.bfloat16()
            continue
        scale = item.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        found[name] = (item.float() / scale).round().to(torch.int8)
        found[name + SCALE] = scale
    return found


def unpacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what `packed` took, in bfloat16."""
    return {
        name: (item.float() * weights[name + SCALE]).bfloat16() if name + SCALE in weights else item
        for name, item in weights.items()
        if not name.endswith(SCALE)
    }


def write_pieces(model: Path, output: Path, dtype: str, piece: int = PIECE) -> list[Path]:
    """Write the pieces of a model, and `pieces.json`, which comes last.

    Args:
        model: folder of a model, or of a training of `train_dense_mla` that has a checkpoint.
        output: an empty folder, or none yet.
        dtype: `int8` or `bf16`.
        piece: bytes of a piece, at most.

    Raises:
        SystemExit: if there is neither a model nor a checkpoint, or the folder has files.
    """
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, "scripts.bench.search.weights"):
        if [item.name for item in output.iterdir() if not item.name.startswith(".")]:
            raise SystemExit(f"{output}: has files, expected an empty folder")
        weights, texts = _read(model)
        data = save(packed(weights, dtype), {name: text for name, text in texts.items()})
        paths, about = [], []
        for number, start in enumerate(range(0, len(data), piece)):
            part = data[start : start + piece]
            paths.append(output / f"weights-{number:03d}")
            paths[-1].write_bytes(part)
            about.append({"file": paths[-1].name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})
        manifest = {"schema": SCHEMA, "dtype": dtype, "pieces": about}
        write_atomically(output / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return [*paths, output / MANIFEST]


def _read(model: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    texts = {name: (model / name).read_text() for name in TEXTS if (model / name).exists()}
    if (model / WEIGHTS).exists():
        return load_file(model / WEIGHTS), texts
    if not (model / CHECKPOINT).exists():
        raise SystemExit(f"{model}: has neither {WEIGHTS} nor {CHECKPOINT}, expected a model or a training")
    state: dict[str, Any] = torch.load(model / CHECKPOINT, map_location="cpu", weights_only=True)
    progress = {key: state[key] for key in ("step", "since", "ends", "spent", "identity")}
    texts |= {"config.json": json.dumps(state["identity"]["config"], indent=2), PROGRESS: json.dumps(progress)}
    return state["model"], texts


def join(folders: Sequence[Path], output: Path) -> None:
    """Write the model that the pieces in `folders` are of; its weights come last.

    Raises:
        SystemExit: if a piece is missing or damaged.
    """
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, "scripts.bench.search.weights"):
        manifest = _manifest(_found(folders, MANIFEST))
        missing = [item["file"] for item in manifest if not any((folder / item["file"]).exists() for folder in folders)]
        if missing:
            raise SystemExit(f"missing: {', '.join(missing)}; expected all {len(manifest)} pieces")
        data = b"".join(_checked(_found(folders, item["file"]), item) for item in manifest)
        weights = unpacked(load(data))
        size = int.from_bytes(data[:8], "little")
        texts: dict[str, str] = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        for name in TEXTS:
            if name in texts:
                write_atomically(output / name, texts[name])
        partial = output / f"{WEIGHTS}.part"
        save_file(weights, partial, {"format": "pt"})
        partial.rename(output / WEIGHTS)


def _manifest(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
        if found["schema"] == SCHEMA:
            return [{key: item[key] for key in ("file", "bytes", "sha256")} for item in found["pieces"]]
        raise SystemExit(f"{path}: schema is {found['schema']}, expected {SCHEMA}")
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: {type(error).__name__}: {error}; expected the list of pieces") from None


def _found(folders: Sequence[Path], name: str) -> Path:
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    if path is None:
        raise SystemExit(f"{name}: in none of {', '.join(map(str, folders))}, expected it among the pieces")
    return path


def _checked(path: Path, item: dict[str, Any]) -> bytes:
    data = path.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != item["sha256"]:
        raise SystemExit(f"{path}: {len(data)} bytes of sha256 {found}, expected {item['bytes']} of {item['sha256']}")
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    pieces = commands.add_parser("pieces", help="from a model to pieces")
    pieces.add_argument("model", type=Path)
    pieces.add_argument("--dtype", choices=("int8", "bf16"), default="bf16")
    joined = commands.add_parser("join", help="from pieces to a model")
    joined.add_argument("folders", type=Path, nargs="+")
    for command in (pieces, joined):
        command.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        if options.command == "join":
            join(options.folders, options.output)
        else:
            paths = write_pieces(options.model, options.output, options.dtype)
            print(f"{options.output}: {len(paths)} files, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB")
    except FolderError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
