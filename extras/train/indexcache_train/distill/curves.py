"""Curves of a training run, as an SVG file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_BLUE, _RED, _GREY = "#2563a8", "#c8352b", "#7a7f87"


def draw(records: Sequence[Mapping[str, Any]], warmup_steps: int) -> str:
    """Draw losses, held out and in training, and the divergence of each indexer, over the steps.

    Args:
        records: the log's records.
        warmup_steps: step at which the sparse stage begins.
    """
    steps = [record for record in records if "losses" not in record]
    held_out = {(r["stage"], r["step"]): r["held_out_loss"] for r in records if "losses" in r}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    losses, divergences = figure.subplots(1, 2)
    trained = [record for record in steps if "loss" in record]
    losses.plot([r["step"] for r in trained], [r["loss"] for r in trained], color=_BLUE, alpha=0.35, label="training")
    places = [(step, loss) for (stage, step), loss in held_out.items() if stage in ("warmup", "sparse")]
    losses.plot(*zip(*places, strict=True), color=_BLUE, marker="o", markersize=3.5, label="held out")
    for name, color in (("original", _GREY), ("training-free", _RED)):
        if (name, 0) in held_out:
            losses.axhline(held_out[name, 0], color=color, linewidth=0.9, linestyle="--", label=f"{name}, held out")
    losses.set_ylabel("loss, nats a token")
    layers = list(steps[-1]["kl_layers"])
    colors = matplotlib.colormaps["viridis"]
    for number, layer in enumerate(layers):
        values = [record["kl_layers"][layer] for record in steps]
        shade = colors(0.9 * number / max(1, len(layers) - 1))
        label = f"layer {layer}" if number in (0, len(layers) - 1) else None
        divergences.plot([record["step"] for record in steps], values, color=shade, linewidth=1, label=label)
    divergences.set_ylabel("KL of each indexer, nats a query")
    divergences.set_yscale("log")
    for axes in (losses, divergences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("step")
        if 0 < warmup_steps < steps[-1]["step"]:
            axes.axvline(warmup_steps, color=_GREY, linewidth=0.8)
        axes.legend(frameon=False, fontsize=8)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
