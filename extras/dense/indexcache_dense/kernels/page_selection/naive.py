"""The definitions, in PyTorch, one request after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from indexcache_dense.kernels.page_selection.memory import StepMemory
from indexcache_dense.kernels.pages import CachedPages, PageBudget
from indexcache_kernels.errors import KernelInputError


def slots_of(table: Tensor, table_page: int) -> Tensor:
    """Return the slot of each token, in order: `[..., M * table_page]`, int64."""
    return (table.long()[..., None] * table_page + torch.arange(table_page, device=table.device)).flatten(-2)


def row_of(table: Tensor, starts: Tensor | None, row: int) -> Tensor:
    """Return a request's entries, maybe with more behind them: its row of a table, or from its start in a list."""
    return table[row] if starts is None else table[int(starts[row]) :]


def entries_of(pages: CachedPages, row: int, tokens: int) -> Tensor:
    """Return the entries of a request that hold its first `tokens`.

    Raises:
        KernelInputError: if there are fewer.
    """
    page = pages.table_page
    entries = row_of(pages.table, pages.starts, row)[: -(-tokens // page)]
    if len(entries) * page < tokens:
        raise KernelInputError(
            f"request {row} has {tokens} tokens, and its table {len(entries)} pages of {page}; expected as many"
        )
    return entries


def token_slots(pages: CachedPages, row: int, tokens: int) -> Tensor:
    """Return the slots of a request's first `tokens`, int64.

    Raises:
        KernelInputError: if its table has fewer.
    """
    return slots_of(entries_of(pages, row, tokens), pages.table_page)[:tokens]


def page_scores(
    q: Tensor,
    k: Tensor,
    pages: CachedPages,
    *,
    lse: Tensor,
    scale: float,
    budget: PageBudget,
    out: Tensor,
    memory: StepMemory | None,
) -> None:
    """Write into `out`, `[B, N]`: the sum over a page's tokens of the largest share that a head gives each."""
    for row, length in enumerate(pages.lengths.tolist()):
        live = -(-length // budget.page_tokens)
        if live <= budget.pages or (memory is not None and not memory.due(row)):
            continue
        keys = (
            k[token_slots(pages, row, length)].float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        )  # [L, H, D]
        logits = torch.einsum("hd,lhd->hl", q[row].float(), keys) * scale
        shares = (logits - lse[row, :, None]).exp().amax(0)  # [L]
        padded = F.pad(shares, (0, live * budget.page_tokens - length))
        out[row, :live] = padded.view(live, budget.page_tokens).sum(1)


def selected(scores: Tensor, length: int, budget: PageBudget) -> list[int]:
    """Return the pages that one request attends to, ascending; `scores` is `[N]`."""
    live = -(-length // budget.page_tokens)
    if live <= budget.pages:
        return list(range(live))
    first, last = budget.sink_pages, live - budget.recent_pages
    needed = budget.pages - budget.recent_pages - budget.sink_pages
    ranked = sorted(range(first, last), key=lambda page: (-float(scores[page]), page))
    return [*range(first), *sorted(ranked[:needed]), *range(last, live)]


def remembered(scores: Tensor, row: int, length: int, memory: StepMemory, budget: PageBudget) -> Tensor:
    """Return the scores, `[N]`, that a request's pages are taken by in this step, and remember it."""
    live = -(-length // budget.page_tokens)
    request = int(memory.requests[row])
    step, own = int(memory.steps[request]), memory.rows[request]
    memory.steps[request] = step + 1
    found = scores.clone()
    if memory.averages is not None:
        if step:
            found[:live] = memory.beta * own[:live] + (1 - memory.beta) * found[:live]
        else:
            own.zero_()
        own[:live] = found[:live]
        return found
    if step % memory.every == 0:
        taken = selected(scores, length, budget)
        own.zero_()
        own[taken[budget.sink_pages : -budget.recent_pages]] = True
        return found
    found[:live] = own[:live].float()  # as many as are to be taken
    return found


def select_pages(
    scores: Tensor,
    pages: CachedPages,
    budget: PageBudget,
    out_table: Tensor,
    out_starts: Tensor | None,
    out_lengths: Tensor,
    memory: StepMemory | None,
) -> None:
    """Write the table of the selected pages, and how many tokens they hold."""
    entries = budget.page_tokens // pages.table_page  # of the table, a page
    for row, length in enumerate(pages.lengths.tolist()):
        own = entries_of(pages, row, length)
        by = scores[row]
        if memory is not None and length > budget.pages * budget.page_tokens:
            by = remembered(by, row, length, memory, budget)
        taken = selected(by, length, budget)
        missing = -(-length // budget.page_tokens) * budget.page_tokens - length  # in the last page
        tokens = len(taken) * budget.page_tokens - missing
        entry_numbers = [page * entries + entry for page in taken for entry in range(entries)]
        at = torch.tensor(entry_numbers, dtype=torch.long, device=scores.device)
        at = at[: -(-tokens // pages.table_page)]
        row_of(out_table, out_starts, row)[: len(at)] = own[at]
        out_lengths[row] = tokens
