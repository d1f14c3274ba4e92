r"""Compute a latency table of context parallelism from one of a rank with all heads. Needs no GPU.

    python -m scripts.bench.serving.divide_prices glm-5-64h-h200.json --name glm-5-cp8-h200 \
        --collectives all_reduce.json --output glm-5-cp8-h200.json

Of n ranks each attends and selects for 1/n of a prompt's tokens, with all heads: that part of a layer's time is
divided, which is the least that it can take. Experts are divided among the ranks either way, so their time stays.
Behind attention hidden states are gathered, and behind experts scattered; cached keys are gathered. Decoding is not
divided. The table has F and S alone: what ranks send each other for blocks of queries was not measured. Nor was
anything of such a table as a whole: it has no checks, and says so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from indexcache_search.strategies.budget.table import LatencyTable
from scripts.bench.serving.price_table import BYTES

KEY_BYTES = {"bfloat16": 2.0, "fp8_e4m3": 656 / 576}  # of a cached value; fp8 has scales, and a rotary part in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="of one rank with all heads of the model, as `prices` writes it")
    parser.add_argument("--name", required=True)
    parser.add_argument("--collectives", type=Path, required=True, help="output of `scripts.bench.serving.all_reduce`")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    content = divided(LatencyTable.load(str(options.table)), options.name, json.loads(options.collectives.read_text()))
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(LatencyTable.load(str(options.output)), flush=True)


def divided(table: LatencyTable, name: str, reduced: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a model whose ranks divide the tokens of prompts among them.

    Raises:
        SystemExit: if the table is not of a whole model on several ranks, of which one was measured.
    """
    whole = table.whole
    if whole is None or whole.tp < 2 or whole.cp > 1 or whole.collectives == "measured":
        raise SystemExit(f"{table}: expected a table of one rank of several, with experts")
    hidden = whole.shape["hidden_size"]

    def part(row: list[float]) -> list[float]:
        return [
            round((each - experts) / whole.tp + experts, 3) for each, experts in zip(row, whole.expert_ms, strict=True)
        ]

    keys = (table.kv_lora_rank + table.qk_rope_head_dim) * KEY_BYTES[
        table.kv_cache_dtype
    ] + BYTES * table.index_head_dim
    largest = max(reduced["sizes"], key=int)
    content = table.model_dump(mode="json", by_alias=True)
    content["name"] = name
    content["prompt"] |= {kind: {1: part(getattr(table.prompt, kind)[1])} for kind in ("full_ms", "shared_ms")}
    content["whole"] |= {
        "label": f"{whole.label}; attention and indexers divided by {whole.tp}, experts as they are",
        "cp": whole.tp,
        "derived_from": table.name,
        "collectives": {
            "ranks": whole.tp,
            "bytes_per_token": round(2 * hidden * BYTES + keys),
            "gb_s": round(reduced["sizes"][largest]["bus_gb_s"], 1),
            "measured_ranks": reduced["ranks"],
            "step_ms": round(2 * reduced["sizes"]["1"]["ms"], 4),
        },
    }
    content["checks"] = []
    LatencyTable.model_validate(content)
    return content


if __name__ == "__main__":
    main()
