"""Real launch lines, and seeded mutations of them: abbreviated, joined with =, repeated, reordered, in a file."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from typing import Any

REAL = [  # of SGLang's documentation, its cookbook and public threads, shortened
    "--tp-size 8 --dp-size 8 --enable-dp-attention --trust-remote-code --mem-fraction-static 0.85",
    "--tp-size 8 --attn-cp-size 8 --enable-prefill-cp --cp-strategy interleave --chunked-prefill-size 16384",
    "--tp-size 8 --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 4",
    "--tp-size 8 --attn-dp-size 8 --enable-hicache --hicache-ratio 2 --hicache-storage-backend mooncake",
    "--disaggregation-mode decode --tp-size 16 --dp-size 16 --enable-dp-attention --moe-a2a-backend deepep"
    " --deepep-mode low_latency --enable-two-batch-overlap --nnodes 2 --node-rank 0 --moe-dense-tp-size 1",
    "--kv-cache-dtype fp8_e4m3 --dsa-prefill-backend flashmla_kv --dsa-decode-backend flashmla_kv --page-size 64",
    "--enable-torch-compile --cuda-graph-max-bs-decode 64 --cuda-graph-bs-decode 1 2 4 8 --disable-radix-cache",
    "--enable-hisparse --hisparse-config {} --disable-overlap-schedule --log-level info",
    "--use-ray --nnodes 2 --dist-init-addr 10.0.0.7:5757 --pp-size 2 --enable-mixed-chunk",
    "--enable-lmcache --enable-single-batch-overlap --dcp-size 2 --attention-backend dsa --dsa-topk-backend torch",
    "--cuda-graph-backend-prefill breakable --enable-deterministic-inference --enable-dsa-fused-indexer",
]
_FLAGS = [word for line in REAL for word in line.split() if word.startswith("--")]
_ODD = ["--lala", "--enable", "-x", "--", "stray", "--tp-size x", "--kv-cache-dtype FP8", "--tp_size 2", "--config"]

Pieces = list[list[str]]


def mutations(count: int, rng: random.Random) -> Iterator[tuple[list[str], dict[str, Any] | None]]:
    """Yield words of launch lines, and the content of `server.yaml` where they name it."""
    for _ in range(count):
        pieces = _pieces(rng.choice(REAL).split())
        content: dict[str, Any] | None = None
        for _ in range(rng.randint(1, 3)):
            change = rng.choice((_shorten, _join, _shuffle, _repeat, _drop, _odd, _mix, _underscores))
            change(pieces, rng)
        if rng.random() < 0.25 and pieces:
            content = _into_file(pieces, rng)
        yield [word for piece in pieces for word in piece], content


def _pieces(words: list[str]) -> Pieces:
    pieces: Pieces = []
    for word in words:
        if word.startswith("--") or not pieces:
            pieces.append([])
        pieces[-1].append(word)
    return pieces


def _shorten(pieces: Pieces, rng: random.Random) -> None:
    """Cut an option somewhere behind its first letters: the rest may mean one flag, several or none."""
    piece = rng.choice(pieces)
    piece[0] = piece[0][: rng.randint(4, max(4, len(piece[0])))]


def _join(pieces: Pieces, rng: random.Random) -> None:
    piece = rng.choice(pieces)
    value = piece[1] if len(piece) > 1 else rng.choice(("true", "1", ""))
    piece[:] = [f"{piece[0]}={value}", *piece[2:]]


def _shuffle(pieces: Pieces, rng: random.Random) -> None:
    rng.shuffle(pieces)


def _repeat(pieces: Pieces, rng: random.Random) -> None:
    piece = rng.choice(pieces)
    number = len(piece) > 1 and piece[1].isdecimal()
    pieces.append([piece[0], str(rng.randint(1, 9))] if number else list(piece))


def _drop(pieces: Pieces, rng: random.Random) -> None:
    if len(pieces) > 1:
        pieces.pop(rng.randrange(len(pieces)))


def _odd(pieces: Pieces, rng: random.Random) -> None:
    pieces.insert(rng.randint(0, len(pieces)), rng.choice(_ODD).split())


def _mix(pieces: Pieces, rng: random.Random) -> None:
    """Add an option of another line, without its value."""
    pieces.append([rng.choice(_FLAGS)])


def _underscores(pieces: Pieces, rng: random.Random) -> None:
    """Write a flag as Python would; SGLang takes that in files alone."""
    piece = rng.choice(pieces)
    piece[0] = "--" + piece[0].lstrip("-").replace("-", "_")


def as_text(words: list[str], variables: dict[str, str], rng: random.Random) -> str:
    """Write words as somebody would into a shell: quoted or not, over several lines, behind variables or a program."""
    head = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    program = rng.choice(
        ("", "python -m sglang.launch_server", "sglang serve", "/opt/bin/python3 -W ignore -m sglang.launch_server")
    )
    quoted = [f"'{word}'" if rng.random() < 0.2 and "'" not in word else shlex.quote(word) for word in words]
    return rng.choice((" ", " \\\n  ")).join([*head, *([program] if program else []), *quoted])


def _into_file(pieces: Pieces, rng: random.Random) -> dict[str, Any]:
    """Move options into a file that is named in their place."""
    moved = [pieces.pop(rng.randrange(len(pieces))) for _ in range(rng.randint(1, len(pieces)))]
    content: dict[str, Any] = {}
    for piece in moved:
        key, values = piece[0].lstrip("-").partition("=")[0] or "x", piece[1:]
        content[key] = True if not values else values if len(values) > 1 else values[0]
    name = rng.choice((["--config", "server.yaml"], ["--config=server.yaml"], ["--config", "server.yaml"]))
    pieces.insert(rng.randint(0, len(pieces)), name)
    return content
