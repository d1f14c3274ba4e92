"""Make a latency table of what `scripts.bench.serving.prices` measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from indexcache_search.strategies.budget.table import WHOLE, LatencyTable
from scripts.bench.serving.conditions import PLAIN
from sglang_indexcache import Pattern

KINDS = "kinds"
ALL_REDUCES = 2  # of a layer: behind attention, and behind experts
BYTES = 2  # bfloat16
UNTIMED = 2  # layers in front of those that are timed


@dataclass(frozen=True)
class Shape:
    """The model that is measured: its config.json, of what it is a rank, and how the engine divides it."""

    config: dict[str, Any]
    whole: dict[str, Any]
    engine: dict[str, Any]
    queries: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path, engine: dict[str, Any], queries: tuple[int, ...]) -> Shape:
        """Read a model's folder.

        Raises:
            SystemExit: if it does not say of which model it has the ranks, or has too few layers.
        """
        if not (folder / "rank_of.json").exists():
            raise SystemExit(f"{folder} has no rank_of.json, expected a folder of scripts.bench.serving.rank_model")
        config, whole = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "rank_of"))
        least = UNTIMED + 2 * len(queries)
        if config["num_hidden_layers"] < least or queries[:1] != (1,):
            raise SystemExit(f"found {config['num_hidden_layers']} layers, expected {least} for queries 1, ...")
        if not 1 <= config["first_k_dense_replace"] <= UNTIMED:
            raise SystemExit(f"found {config['first_k_dense_replace']} dense layers, expected 1 or {UNTIMED}")
        return cls(config, whole, engine, queries)

    @property
    def layers(self) -> int:
        """Layers of the model that is measured."""
        return int(self.config["num_hidden_layers"])

    @property
    def dense(self) -> int:
        """Layers with a dense MLP, among those that were measured."""
        return int(self.config["first_k_dense_replace"])

    @property
    def tp(self) -> int:
        """GPUs of the engine."""
        return int(self.engine.get("tp_size", 1))

    @property
    def cp(self) -> int:
        """GPUs among which it divides the tokens of a prompt."""
        return int(self.engine.get("attn_cp_size", 1))

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return int(self.engine["chunked_prefill_size"])

    @property
    def weights(self) -> str:
        """Data type of the weights."""
        return str(self.config.get("quantization_config", {}).get("quant_method", self.config["torch_dtype"]))

    def check(self, lengths: Sequence[int]) -> None:
        """Check that prompts are made of whole chunks.

        Raises:
            SystemExit: if they are not, or do not rise.
        """
        if wrong := [length for length in lengths if length % self.chunk] or list(lengths) != sorted(set(lengths)):
            raise SystemExit(f"found lengths {wrong or lengths}, expected rising multiples of {self.chunk}")


def of_all_kinds(layers: int, queries: Sequence[int]) -> Pattern:
    """Return a pattern with an `F` of each kind and an `S` behind it, as often as they fit, behind two more `F`."""
    times = (layers - UNTIMED) // (2 * len(queries))
    kinds = list(queries) * times
    pattern = Pattern.parse("F" * UNTIMED + "FS" * len(kinds) + "F" * (layers - UNTIMED - 2 * len(kinds)))
    for number, each in enumerate(kinds):
        if each > 1:
            pattern = pattern.selecting_for(UNTIMED + 2 * number, each)
    return pattern


@dataclass(frozen=True)
class Measured:
    """What engines measured, by their names: `whole` prompts, and of `kinds` the layers (`ms`, `behind_ms`)."""

    shape: Shape
    lengths: list[int]
    conditions: dict[str, str]
    found: dict[str, dict[str, Any]]

    def whole(self, name: str, kind: str) -> list[float]:
        """Return medians of an engine's whole prompts or steps, by length."""
        return [statistics.median(self.found[name]["whole"][str(length)][kind]) for length in self.lengths]

    def layer(self, layers: Sequence[int], kind: str = "ms") -> list[float]:
        """Return medians over layers and prompts, by length."""
        ends = [length // self.shape.chunk - 1 for length in self.lengths]
        prompts = self.found[KINDS][kind]
        return [
            round(statistics.median(prompt[layer][end] for prompt in prompts for layer in layers), 3) for end in ends
        ]

    @cached_property
    def _starts(self) -> dict[int, list[int]]:
        pattern = of_all_kinds(self.shape.layers, self.shape.queries)
        timed = range(UNTIMED, UNTIMED + 2 * pattern.letters.count("S"), 2)
        return {
            queries: [layer for layer in timed if pattern.queries[layer] == queries] for queries in self.shape.queries
        }

    def prompt(self) -> dict[str, Any]:
        """Return the section `prompt`."""
        full = {queries: self.layer(starts) for queries, starts in self._starts.items()}
        shared = {queries: self.layer([start + 1 for start in starts]) for queries, starts in self._starts.items()}
        rows = zip(self.whole(PLAIN, "prefill_ms"), full[1], self.dense_ms, self.expert_ms, strict=True)
        shape = self.shape
        return {
            "full_ms": full,
            "shared_ms": shared,
            "rest_ms": [
                round(total - shape.layers * each - shape.dense * (dense - experts), 3)
                for total, each, dense, experts in rows
            ],
        }

    @property
    def expert_ms(self) -> list[float]:
        """What comes behind attention in layers with experts."""
        return self.layer(range(UNTIMED, self.shape.layers), "behind_ms")

    @property
    def dense_ms(self) -> list[float]:
        """What comes behind attention in layers with a dense MLP."""
        return self.layer(range(self.shape.dense), "behind_ms")

    def decode(self) -> dict[str, Any]:
        """Return the section `decode`."""
        shared = of_all_kinds(self.shape.layers, self.shape.queries).letters.count("S")
        steps = list(zip(self.whole(PLAIN, "decode_ms"), self.whole(KINDS, "decode_ms"), strict=True))
        full = [plain / self.shape.layers for plain, _ in steps]
        saved = [(plain - kinds) / shared for plain, kinds in steps]
        return {
            "full_ms": [round(each, 4) for each in full],
            "shared_ms": [round(each - less, 4) for each, less in zip(full, saved, strict=True)],
        }

    def check(self, name: str, table: LatencyTable) -> list[dict[str, Any]]:
        """Return the checks of a pattern."""
        found = []
        for length, measured, plain in zip(
            self.lengths, self.whole(name, "prefill_ms"), self.whole(PLAIN, "prefill_ms"), strict=True
        ):
            values = self.found[name]["whole"][str(length)]["prefill_ms"]
            expected = table.as_measured(length).prompt_ms(Pattern.parse(self.conditions[name]))
            found.append(
                {
                    "pattern": self.conditions[name],
                    "context": length,
                    "measured_ms": round(measured, 1),
                    "expected_ms": round(expected, 1),
                    "plain_ms": round(plain, 1),
                    "spread": round((max(values) - min(values)) / measured, 4),
                }
            )
        return found


def content_of(found: Measured, name: str, reduced: dict[str, Any] | None, notes: str) -> dict[str, Any]:
    """Return a table.

    Args:
        found: what was measured.
        name: of the table.
        reduced: output of `scripts.bench.serving.all_reduce`, where one GPU is one of several ranks.
        notes: what else a reader must know.

    Raises:
        SystemExit: if an all-reduce is given that the layers' times contain, or is of another model.
    """
    shape, plain = found.shape, found.found[PLAIN]
    if versions := [other for other in found.found.values() if other["versions"] != plain["versions"]]:
        raise SystemExit(f"found engines of {versions[0]['versions']} and of {plain['versions']}, expected one SGLang")
    config, engine = shape.config, shape.engine
    content: dict[str, Any] = {
        "schema": WHOLE,
        "name": name,
        "device": plain["device"],
        "versions": plain["versions"],
        "date": datetime.now(UTC).date().isoformat(),
        "heads": config["num_attention_heads"] // (shape.tp // shape.cp),
        "index_heads": config["index_n_heads"],
        **{key: config[key] for key in ("index_topk", "index_head_dim", "kv_lora_rank", "qk_rope_head_dim")},
        "kv_cache_dtype": engine["kv_cache_dtype"],
        "chunk": shape.chunk,
        "layers": shape.layers,
        "contexts": found.lengths,
        "prompt": found.prompt(),
        "decode": found.decode(),
        "whole": {
            "label": label(shape),
            "tp": shape.whole["tp"],
            "cp": shape.cp,
            **{key: shape.whole[key] for key in ("layers", "dense_layers", "shape")},
            "measured_dense_layers": shape.dense,
            "expert_ms": found.expert_ms,
            "dense_ms": found.dense_ms,
            "collectives": collectives(shape, reduced),
        },
        "checks": [],
        "notes": " ".join(filter(None, [notes, f"Engine: {json.dumps(engine)}"])),
    }
    table = LatencyTable.model_validate(content)
    names = [name for name in found.conditions if name not in (KINDS, PLAIN)]
    content["checks"] = [check for name in names for check in found.check(name, table)]
    return content


def label(shape: Shape) -> str:
    """Say what was measured."""
    config, gpus = shape.config, "one GPU" if shape.tp == 1 else f"{shape.tp} GPUs"
    experts = f"{config['n_routed_experts']} experts of width {config['moe_intermediate_size'] // shape.tp} a rank"
    return f"{shape.layers} layers with {experts} ({shape.weights} weights) measured on {gpus}"


def collectives(shape: Shape, reduced: dict[str, Any] | None) -> dict[str, Any] | str:
    """Return what ranks send each other: in the times, by a formula, or unknown."""
    if shape.tp > 1:
        if reduced is not None:
            raise SystemExit("--collectives is given, but the layers of several GPUs contain their all-reduces")
        return "measured"
    if reduced is None:
        return "unknown"
    if reduced["hidden"] != shape.config["hidden_size"] or "1" not in reduced["sizes"]:
        raise SystemExit(f"--collectives is of {reduced['hidden']}, expected {shape.config['hidden_size']} and 1 token")
    largest = max(reduced["sizes"], key=int)
    return {
        "ranks": shape.whole["tp"],
        "bytes_per_token": ALL_REDUCES * 2 * shape.config["hidden_size"] * BYTES,
        "gb_s": round(reduced["sizes"][largest]["bus_gb_s"], 1),
        "measured_ranks": reduced["ranks"],
        "step_ms": round(ALL_REDUCES * reduced["sizes"]["1"]["ms"], 4),
    }
