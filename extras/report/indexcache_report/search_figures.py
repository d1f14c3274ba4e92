"""The report's figures, as SVG text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from markupsafe import Markup
from matplotlib.patches import Rectangle

from indexcache_report.drawing import BLUE, GREY, RED, blank, svg
from indexcache_search.results.schema import SearchResult
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import full_layer_count


def loss_figure(result: SearchResult) -> Markup:
    """Loss after each greedy step, with 1/2, 1/4 and 1/8 marked (the figure of the paper's Section 3.1.2)."""
    steps, search = result.steps, result.pattern_file.search
    assert search is not None
    num_layers = result.pattern_file.model.num_layers
    baseline = search.baseline_loss
    losses = [baseline, *(step.loss for step in steps)]
    errors = [0.0, *(step.increase.stderr or 0.0 for step in steps)]
    figure, axes = blank(8, 3.6)
    x = np.arange(len(losses))
    low, high = np.subtract(losses, errors), np.add(losses, errors)
    axes.fill_between(x, low, high, color=BLUE, alpha=0.15, linewidth=0, label="± standard error of the increase")
    axes.plot(x, losses, color=BLUE, marker="o", markersize=3.5, linewidth=1.4)
    axes.axhline(baseline, color=GREY, linewidth=0.8, linestyle="--")
    counts = [step.full_layers for step in steps]
    for retention in (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)):
        count = full_layer_count(num_layers, retention)
        if count in counts:
            at = counts.index(count) + 1
            axes.axvline(at, color=RED, linewidth=0.8, alpha=0.6)
            axes.annotate(
                str(retention), (at, 1.0), xycoords=("data", "axes fraction"), color=RED, ha="center", va="bottom"
            )
    axes.set_xticks(x, ["none", *(str(step.layer) for step in steps)], fontsize=8 if len(steps) < 40 else 5)
    axes.set_xlabel("layer that becomes S at each step")
    axes.set_ylabel(f"calibration {search.objective}")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return svg(figure, f"Calibration {search.objective} after each step, from {baseline:.4f} to {losses[-1]:.4f}")


def heat_map_figure(overlap: Sequence[Sequence[float]], pattern: Pattern, title: str) -> Markup:
    """Index overlap of all layer pairs, with the blocks of layers that share one index set outlined."""
    figure, axes = blank(4.2, 3.9)
    axes.spines[:].set_visible(False)
    image = axes.imshow(overlap, origin="lower", vmin=0.0, vmax=1.0, cmap="viridis")
    starts = [*pattern.full_layers, len(pattern)]
    for start, end in itertools.pairwise(starts):
        size = end - start
        axes.add_patch(Rectangle((start - 0.5, start - 0.5), size, size, fill=False, edgecolor=RED, linewidth=1.6))
    axes.set_title(f"{title}: {pattern}" if len(pattern) <= 32 else title, fontsize=9)
    axes.set_xlabel("layer", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    axes.tick_params(labelsize=8)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03).ax.tick_params(labelsize=8)
    return svg(figure, f"Share of selections that two layers have in common, {title}")
