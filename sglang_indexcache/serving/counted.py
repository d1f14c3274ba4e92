"""Counting how often each layer's indexer runs in the first passes of each kind; then nothing of ours is in a pass.

Roles that are read back say what a layer would do, and a server was seen elsewhere that ran every indexer although the
roles were right. So in the first passes each call of an attention module is looked at: an F layer must have run its
indexer once by its end, an S layer never. Where prompts attend to everything an indexer only writes its keys; SGLang up
to 0.5.14 lets S layers do that, too, and nobody reads them. So prompts count once one was longer than a selection.
Graphs are counted while they are captured, on every rank; where one of prompts is replayed, the method that selects is
observed, or, where the graph holds the whole indexer (DeepSeek-V4), SGLang's call that replays it. PyTorch's module
hooks do the rest. All is taken away once every kind of pass that the server makes was seen, and all graphs are
captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import RAN_INDEXER
from sglang_indexcache.sglang.attention import CountedAttention, Observed, makes_graphs
from sglang_indexcache.sglang.hooks import refusing

logger = logging.getLogger(__name__)

EXTEND, DECODE, VERIFY, DRAFT_EXTEND = "extend", "decode", "target verify", "draft extend"
SHORT, REPLAYED = "extend, all selected", "extend (replayed)"
UNCOUNTED = "extend (replayed, not counted)"  # in a graph whose indexers nobody could count
_KINDS = {  # by the name of SGLang's ForwardMode
    "EXTEND": EXTEND,
    "MIXED": "mixed",
    "SPLIT_PREFILL": EXTEND,
    "DECODE": DECODE,
    "TARGET_VERIFY": VERIFY,
    "DRAFT_EXTEND": DRAFT_EXTEND,
    "DRAFT_EXTEND_V2": DRAFT_EXTEND,
}
CAPTURED = " (captured)"
_PREFILL, _DECODE = "prefill", "decode"  # --disaggregation-mode


def kinds_of(server_args: Any, draft: bool = False) -> frozenset[str]:
    """Return the kinds of passes that a server makes of its target model, or of its draft model."""
    mode = getattr(server_args, "disaggregation_mode", None)
    if draft:
        return frozenset({DRAFT_EXTEND}) if mode != _PREFILL else frozenset({EXTEND})
    steps = VERIFY if getattr(server_args, "speculative_algorithm", None) else DECODE
    return frozenset({EXTEND} if mode == _PREFILL else {steps} if mode == _DECODE else {EXTEND, steps})


class Counter:
    """Counts the indexers of one model on this rank.

    Args:
        attentions: its attention modules.
        name: what a site is called in messages.
        selects_after: prompts are counted once one had more tokens, of which something was selected; `None` if that
            does not matter.

    Attributes:
        passes: passes that were counted, by kind.
        longest: tokens of the longest prompt in a pass that selected.
    """

    def __init__(
        self, attentions: Iterable[CountedAttention], name: str = "layer", selects_after: int | None = None
    ) -> None:
        self._attentions, self._name, self._selects_after = list(attentions), name, selects_after
        self._missing: set[str] = set()
        self._kinds = self._captured = frozenset[str]()
        self._last = max((item.site for item in self._attentions), default=-1)
        self._called = False  # whether an indexer is in a call of its module
        self._ran: list[tuple[int, bool]] | None = None  # indexers that ran in the open call, and whether they selected
        self._replayed: list[int] = []  # sites that selected in the open pass, in which no module is called
        self._handles: list[Any] = []
        self._graphs: Any = None  # SGLang's runner of graphs of prompts that hold whole indexers
        self._check: Callable[[], None] | None = None
        self.passes: dict[str, int] = {}
        self.longest = 0

    @property
    def missing(self) -> frozenset[str]:
        """The kinds of passes that were not seen yet."""
        return frozenset(self._missing)

    @property
    def counting(self) -> bool:
        """True while the counter's hooks are on the model."""
        return bool(self._handles)

    def begin(self, kinds: Iterable[str]) -> None:
        """Count from now on, until passes of all `kinds` were seen, which are those that the server makes."""
        self._kinds = frozenset(kinds)
        self._begin(self._kinds)

    def observe_replays(self, graphs: Any) -> None:
        """Count prompts that `graphs` replays, if these hold whole indexers.

        What a replay runs was counted while it was captured: nothing of it can be seen again.

        Args:
            graphs: SGLang's runner of them, whose `execute` is called with a `ForwardBatch`.
        """
        if self._graphs is None and self._attentions and all(item.in_graphs for item in self._attentions):
            self._graphs = graphs
            if self.counting:
                self._handles.append(Observed(graphs, "execute", refusing(self._replays)))

    def again(self, check: Callable[[], None] = lambda: None) -> None:
        """Count the next prompts, as after an update of weights; graphs that were captured stay as they are.

        A server that reads no prompts counts what else it does, unless it does that in graphs.

        Args:
            check: called before the first of them; its error ends the process.
        """
        self._captured |= {kind.removesuffix(CAPTURED) for kind in self.passes if kind.endswith(CAPTURED)}
        self._begin(self._kinds & {EXTEND} or self._kinds - self._captured)
        self._check = refusing(check)

    def _begin(self, kinds: frozenset[str]) -> None:
        self.end()
        self.passes.clear()
        self.longest = 0
        self._replayed.clear()
        self._missing = set(kinds) if self._attentions else set()
        for item in self._attentions if kinds else ():
            before, after = _eager(self._before), _eager(refusing(self._after(item)))
            self._handles.append(item.module.register_forward_pre_hook(before))
            self._handles.append(item.module.register_forward_hook(after, with_kwargs=True))
            if item.indexer is not None:
                runs = _eager(self._runs(item.site))
                self._handles.append(item.indexer.register_forward_pre_hook(runs, with_kwargs=True))
                self._handles.append(item.indexer.register_forward_hook(_eager(self._leaves), always_call=True))
                if item.direct is not None and hasattr(item.indexer, item.direct):
                    self._handles.append(Observed(item.indexer, item.direct, self._runs_directly(item.site)))
                if item.selects is not None and hasattr(item.indexer, item.selects):
                    self._handles.append(Observed(item.indexer, item.selects, refusing(self._selects(item))))
        if self._handles and self._graphs is not None:
            self._handles.append(Observed(self._graphs, "execute", refusing(self._replays)))

    def end(self) -> None:
        """Take everything away that counts."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: Any, args: Any) -> None:
        self._check_first()
        self._ran, self._called = [], False

    def _check_first(self) -> None:
        check, self._check = self._check, None
        if check is not None:
            check()

    def _runs(self, site: int) -> Callable[..., None]:
        def runs(module: Any, args: Any, kwargs: Any) -> None:
            self._called = True
            self._note(site, kwargs)

        return runs

    def _leaves(self, module: Any, args: Any, output: Any) -> None:
        self._called = False

    def _runs_directly(self, site: int) -> Callable[..., None]:
        """Note an indexer whose method is called in place of its module."""

        def runs(*args: Any, **kwargs: Any) -> None:
            if not self._called:
                self._note(site, kwargs)

        return runs

    def _note(self, site: int, given: Mapping[str, Any]) -> None:
        if self._ran is not None:
            self._ran.append((site, given.get("return_indices") is not False))

    def _after(self, item: CountedAttention) -> Callable[..., None]:
        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            batch, ran, self._ran = batch_of(args, kwargs), self._ran, None
            if batch is None:
                self.end()
                logger.warning(
                    "indexcache: this SGLang calls attention without a ForwardBatch: indexers are not counted"
                )
                return
            kind = kind_of(batch, kwargs)
            if kind == EXTEND and makes_graphs():  # its rows are made up, though it may run before it is captured
                kind = EXTEND + CAPTURED
            if kind is None or ran is None:  # counting began within this call
                return
            allowed, selected = item.allowed(kwargs), sum(selects for _, selects in ran)
            if selected not in allowed and (len(ran) not in allowed or self._must_select(kind, batch)):
                of_them = "" if selected == len(ran) else f" and selected {selected} times"
                raise ProofError(
                    f"{self._name} {item.site} {RAN_INDEXER} {len(ran)} times{of_them} in a pass ({kind}), expected"
                    f" {' or '.join(map(str, allowed))}"
                )
            for site, _ in ran:
                if site != item.site:
                    raise ProofError(f"{self._name} {item.site} ran the indexer of {site} in a pass ({kind})")
            if item.site == self._last:
                self._seen(kind, batch)

        return after

    def _selects(self, item: CountedAttention) -> Callable[..., None]:
        """Note that a site selects for prompts where no module is called: a graph of prompts is replayed."""
        expected = [item.site for item in self._attentions if 1 in item.allowed({})]

        def selects(*args: Any, **kwargs: Any) -> None:
            batch = batch_of(args, kwargs)
            if self._ran is not None or batch is None:  # within a module that is counted
                return
            due = expected[len(self._replayed)] if expected else None
            if item.site != due:
                self._replayed.clear()
                raise ProofError(
                    f"{self._name} {item.site} selected for a prompt ({REPLAYED}) where {self._name} {due} was next"
                )
            self._replayed.append(item.site)
            if self._replayed == expected:
                self._replayed.clear()
                self._seen(REPLAYED, batch)

        return selects

    def _replays(self, *args: Any, **kwargs: Any) -> None:
        """Note that a graph of prompts is replayed, whose indexers were counted while it was captured, or never."""
        batch = batch_of(args, kwargs)
        if batch is None or _KINDS.get(batch.forward_mode.name) != EXTEND:
            return
        self._check_first()
        counted = EXTEND in self._captured or EXTEND + CAPTURED in self.passes
        self._seen(REPLAYED if counted else UNCOUNTED, batch)

    def _must_select(self, kind: str, batch: Any) -> bool:
        """Return whether a pass is one of prompts that have more than a selection."""
        return kind == EXTEND and self._selects_after is not None and longest_in(batch) > self._selects_after

    def _seen(self, kind: str, batch: Any) -> None:
        seen = EXTEND if kind in (REPLAYED, UNCOUNTED) else kind.removesuffix(CAPTURED)
        if seen == EXTEND and self._selects_after is not None:
            longest = 0 if kind == EXTEND + CAPTURED else longest_in(batch)
            if longest <= self._selects_after:  # a prompt that attends to everything shows nothing of a selection
                seen, kind = SHORT, SHORT if kind == EXTEND else kind
            self.longest = max(self.longest, longest if seen == EXTEND else 0)
        self.passes[kind] = self.passes.get(kind, 0) + 1
        self._missing.discard(seen)
        # A pass runs before it is captured; a graph of prompts is replayed as if it were captured again.
        if not self._missing and (kind in (REPLAYED, UNCOUNTED) or not makes_graphs()):
            self.end()
            if UNCOUNTED in self.passes:
                logger.warning("indexcache: prompts run in graphs whose indexers can't be counted: %s", self.passes)
                return
            logger.info("indexcache: indexers ran as the pattern says, counted in passes: %s", self.passes)


def longest_in(batch: Any) -> int:
    """Return the tokens of the longest request in a `ForwardBatch`, with those read before; 0 if nothing says so."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    if lengths is None:
        parts = (getattr(batch, name, None) or () for name in ("extend_prefix_lens_cpu", "extend_seq_lens_cpu"))
        lengths = [before + more for before, more in zip(*parts, strict=False)]
    return max((int(length) for length in lengths), default=0)


def batch_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the `ForwardBatch` that an attention module is called with; `None` if there is none."""
    given = (kwargs.get("forward_batch"), *args)
    return next((item for item in given if hasattr(item, "forward_mode")), None)


def kind_of(batch: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return the kind of pass that an attention module is called in; `None` without any rows to attend from."""
    mode: str = batch.forward_mode.name
    rows = kwargs.get("hidden_states", kwargs.get("x"))
    if mode == "IDLE" or (hasattr(rows, "shape") and rows.shape[0] == 0):
        return None
    return _KINDS.get(mode, mode.lower().replace("_", " ")) + (CAPTURED if _capturing() else "")


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _eager(hook: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook that does nothing in what TorchDynamo traces: it would be compiled, and stay."""
    import torch

    def guarded(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return guarded
