"""The proof of an engine: `/server_info`, metrics and the message to the main process report nothing else."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sglang_indexcache.io.errors import ProofError, one_line
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.counted import Counter
from sglang_indexcache.version import version

if TYPE_CHECKING:
    from sglang_indexcache.families.dsa.exact import ExactAttention


@dataclass(frozen=True)
class Proof:
    """The pattern that all ranks of this process's model were found to run.

    Attributes:
        pattern: the pattern, read from the loaded modules of all ranks, layer by layer.
        modules: attention modules on this rank.
        ranks: number of ranks that agreed.
        shared_rows: over how many ranks each layer shares out the rows of prompts, by layer.
        contexts: over how many ranks of context parallelism each layer selects in blocks, by layer.
    """

    pattern: Pattern
    modules: int
    ranks: int
    shared_rows: Mapping[int, int] = field(default_factory=dict)
    contexts: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Passes:
    """Forward passes of a process since it started, without idle ones."""

    total: int = 0
    decode: int = 0


class ProofHolder:
    """The proof of one engine in this process, once there is one, and whether it still holds."""

    def __init__(self) -> None:
        self._proof: Proof | None = None
        self._lost: tuple[str, str] | None = None
        self.graphs_captured = False
        self.grouped_layers: list[int] = []  # whose queries of blocks are attended from together
        self.united_layers: list[int] = []  # that attend over unions of selections
        self.exact: ExactAttention | None = None  # what does so on this rank
        self.counters: list[Counter] = []  # of the target model, and of a draft model
        self.passes: Passes | None = None  # where SGLang reports metrics
        self.tell: Callable[[bool], None] = lambda holds: None  # a listener, such as a metric

    def set(self, proof: Proof) -> None:
        """Record that the loaded model was found to run `proof`."""
        self._proof, self._lost = proof, None
        self.tell(True)

    def lose(self, reason: str) -> None:
        """Record that the proof is lost: the model may run something else."""
        self._lost = (datetime.now(UTC).isoformat(timespec="seconds"), one_line(reason, 300))
        self.tell(False)

    @property
    def proof(self) -> Proof:
        """Proof of the model from loading it, or from proving it again.

        Raises:
            ProofError: if the model was loaded without a proof.
        """
        if self._proof is None:
            raise ProofError("the loaded model was not compared with the pattern, since SGLang loads it in another way")
        return self._proof

    @property
    def lost(self) -> str | None:
        """Time and reason of losing the proof, on one line; `None` while it holds."""
        return None if self._lost is None else "not proven since {}: {}".format(*self._lost)

    def _counted(self) -> dict[str, Any]:
        """Return the passes in which indexers were counted, by kind, and the kinds that are still to come.

        `longest_prompt` has the tokens of the longest prompt in a pass that selected.
        """
        passes = Counts[str]()
        for counter in self.counters:
            passes.update(counter.passes)
        missing = sorted({kind for counter in self.counters for kind in counter.missing})
        longest = max(counter.longest for counter in self.counters)
        return {
            "passes": dict(sorted(passes.items())),
            **({"longest_prompt": longest} if longest else {}),
            **({"to_come": missing} if missing else {}),
        }

    def _since_start(self, pattern: Pattern) -> dict[str, int]:
        """Return how often indexers ran, and how often that was saved, by all layers of `pattern`."""
        if self.passes is None:
            return {}
        if pattern.dense:
            return {"decode_passes": self.passes.decode}
        full, shared = len(pattern.full_layers), len(pattern.shared_layers)
        return {"indexer_runs": full * self.passes.total, "indexer_skips": shared * self.passes.total}

    def status(self, source: str) -> dict[str, Any]:
        """Return plain types, for `/server_info`; `source` is the requested file.

        Raises:
            ProofError: as `proof`.
        """
        pattern = self.proof.pattern
        shared, contexts = self.proof.shared_rows, self.proof.contexts
        lost = {} if self._lost is None else dict(zip(("since", "reason"), self._lost, strict=True))
        return {
            **({} if pattern.selection is None else {"selection": pattern.selection.as_dict()}),
            "pattern": pattern.letters,
            "fingerprint": pattern.fingerprint,
            "retention": pattern.retention,
            "full_layers": len(pattern.full_layers),
            "shared_layers": len(pattern.shared_layers),
            **({"own_layers": len(pattern.own_layers)} if pattern.own_layers else {}),
            **({"sharded_layers": len(shared), "sharded_ranks": min(shared.values())} if shared else {}),
            **({"context_layers": len(contexts), "context_ranks": min(contexts.values())} if contexts else {}),
            **({"grouped_layers": len(self.grouped_layers)} if self.grouped_layers else {}),
            **({"union_layers": self.united_layers} if self.united_layers else {}),
            **({} if self.exact is None else {"union_passes": dict(self.exact.passes)}),
            "source": source,
            "version": version(),
            "proven_ranks": self.proof.ranks,
            "proven": self._lost is None,
            **lost,
            **({"counted": self._counted()} if self.counters else {}),
            **self._since_start(pattern),
        }
