"""Metrics of a distillation run, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.losses import Losses
from indexcache_train.distill.settings import TrainingSettings
from sglang_indexcache import ModelLayers


def collect(
    records: Sequence[Mapping[str, Any]],
    held_out: TokenSet,
    model: ModelLayers,
    settings: TrainingSettings,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Collect metrics.json: held-out losses before, during and after training, beside the untrained model's.

    Differences are paired, since all rows are of the same sequences. Where each sequence's divergence is recorded, it
    has a standard error as well.
    """
    evaluations = [record for record in records if "losses" in record]
    original = losses_of(evaluations[0]["losses"], evaluations[0]["tokens"])
    rows = []
    for record in evaluations:
        pattern = model.native if record["stage"] == "original" else settings.pattern
        roles = "D" * len(pattern) if record.get("dense") else pattern.roles
        evaluation = losses_of(record["losses"], record["tokens"])
        loss = estimates.loss(evaluation, held_out)
        rise = estimates.increase(evaluation, original, held_out)
        row = {
            "step": record["step"],
            "stage": record["stage"],
            "pattern": roles,
            "loss": loss.mean,
            "loss_stderr": loss.stderr,
            "increase": rise.mean,
            "increase_stderr": rise.stderr,
            "kl": record["held_out_kl"],
        }
        if "divergences" in record:
            divergence = losses_of(record["divergences"], record["tokens"])
            row["kl_stderr"] = estimates.loss(divergence, held_out).stderr
        rows.append(row)
    return {
        "model": model.name,
        "settings": settings.as_dict(),
        "held_out": {"sha256": held_out.sha256, "sequences": held_out.num_sequences, "sources": held_out.sources},
        "rows": rows,
        "seconds": sum(record.get("seconds", 0.0) for record in records),
        "versions": dict(versions),
    }


def losses_of(sums: Sequence[float], tokens: Sequence[int]) -> Losses:
    """Convert sums and tokens of all sequences to the losses of a search."""
    return Losses(rows=tuple(range(len(sums))), losses=tuple(sums), tokens=tuple(tokens))


def terminal_table(metrics: Mapping[str, Any]) -> Table:
    """Make the table of each stage's last evaluation."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "held-out loss", "over the original", "KL of the indexers"):
        table.add_column(name, justify="left" if not name else "right")
    rows = metrics["rows"]
    last = {row["stage"]: row for row in rows}
    names = {
        "original": "original model",
        "training-free": "pattern, not trained",
        "warmup": "after the warm-up",
        "sparse": "after sparse training",
    }
    for stage, name in names.items():
        if stage in last:
            row = last[stage]
            error = "" if row["increase_stderr"] is None else f" ±{row['increase_stderr']:.4f}"
            table.add_row(name, f"{row['loss']:.4f}", f"{row['increase']:+.4f}{error}", f"{row['kl']:.3f}")
    return table
