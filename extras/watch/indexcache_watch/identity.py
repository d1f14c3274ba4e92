"""What makes two servers the ones whose losses belong together."""

from __future__ import annotations

from dataclasses import dataclass

from indexcache_search.errors import SearchError
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import ServerError
from sglang_indexcache.http.servers import ServedRank, ranks

NONE = "none"  # in the place of the fingerprint of a server without a pattern


@dataclass(frozen=True)
class Identity:
    """What two servers serve.

    Attributes:
        fingerprint: fingerprint of the watched server's pattern, or `NONE`.
        reference_fingerprint: the same of the reference server, which has none.
        model: path or name of the watched server's model; `None` if it does not say.
        reference_model: the same of the reference server.
    """

    fingerprint: str
    reference_fingerprint: str
    model: str | None
    reference_model: str | None

    @classmethod
    def of(cls, served: Address, reference: Address) -> Identity:
        """Ask both servers.

        Raises:
            SearchError: if the reference serves a pattern.
            ServerError: if a server does not answer, or is not proven to serve its pattern.
        """
        (pattern, model), (other, other_model) = _of(served), _of(reference)
        if other != NONE:
            same = "the same pattern" if other == pattern else "a pattern"
            raise SearchError(
                f"--reference: {reference} serves {same}, fingerprint {other[:16]}; expected a server without one"
            )
        return cls(pattern, other, model, other_model)

    def check(self, served: Address, reference: Address) -> None:
        """Ask both servers again.

        Raises:
            SearchError: if one of them serves something else now, or the reference serves a pattern.
            ServerError: as `of`.
        """
        now = Identity.of(served, reference)
        for server, before, after in (
            (served, (self.fingerprint, self.model), (now.fingerprint, now.model)),
            (
                reference,
                (self.reference_fingerprint, self.reference_model),
                (now.reference_fingerprint, now.reference_model),
            ),
        ):
            if before[0] != after[0]:
                raise SearchError(
                    f"{server}: serves another pattern than when this watch began: {after[0][:16]}, expected"
                    f" {before[0][:16]}; the request at hand is not counted"
                )
            if before[1] != after[1]:
                raise SearchError(
                    f"{server}: serves another model than when this watch began: {after[1]}, expected {before[1]}; the"
                    " request at hand is not counted"
                )


def _of(server: Address) -> tuple[str, str | None]:
    found = ranks(server)
    return _pattern_for_prompts(found) or NONE, found[0].model


def _pattern_for_prompts(found: list[ServedRank]) -> str | None:
    """Return the fingerprint of the pattern by which all of a server's ranks read prompts; `None` without a pattern.

    Raises:
        ServerError: if ranks differ, one is not proven any more, or the model is dense, whose prompts are read without
            the pattern.
    """
    address, states = found[0].server, [rank.served for rank in found]
    fingerprints = {None if state is None else state.fingerprint for state in states}
    if len(fingerprints) > 1:
        raise ServerError(f"{address}: its data-parallel ranks serve different patterns, expected one")
    for state in states:
        if state is not None and not state.proven:
            raise ServerError(f"{address}: is not proven to serve its pattern {state.since_when}")
        if state is not None and state.selection is not None:
            raise ServerError(f"{address}: serves a dense model, which reads prompts without its pattern")
    return fingerprints.pop()
