"""Answers of a calibration server, parsed once: types, ranges and consistency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, WrapValidator, field_validator, model_validator

from sglang_indexcache import Pattern
from sglang_indexcache.calibration.protocol import LEASE_SECONDS
from sglang_indexcache.io.fields import Count, Finite
from sglang_indexcache.io.redaction import redacted

ROUNDING = 1e-3  # nats by which a nonnegative sum may fall below 0
_MOST_RANKS = 1 << 16

# JSON has null where a number is not finite, NaN here.
_Number = Annotated[Finite, WrapValidator(lambda value, check: math.nan if value is None else check(value))]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
_Word = Annotated[str, Field(pattern=r"^[ -~]{1,200}$"), AfterValidator(redacted)]  # written to files
_Token = tuple[_Number, Count, Any]  # logprob, id, text


class Answer(BaseModel):
    """Base of answers. Unknown fields are ignored, since SGLang adds some with every version."""

    model_config = {"frozen": True}


class Rank(Answer):
    """Answer of one data-parallel rank to a control request: its state, and the requested data.

    Attributes:
        protocol: version that the server speaks; 1 did not say so, and had neither `boot` nor `switches`.
        boot: made up anew each time that the rank starts.
        switches: of its pattern since then, by whomever.
        pattern: roles, whose digest is `fingerprint`.
        weights_sha256: digest of the loaded checkpoint.
        versions: versions and settings on which losses depend.
        missing: sequences whose baseline has yet to be run.
        sums: sum, sum of squares and count of the divergence, by request.
    """

    protocol: Count = 1
    boot: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    switches: Count = 0
    dp_rank: Annotated[int, Field(ge=0, lt=_MOST_RANKS)]
    pattern: Annotated[str, Field(pattern=r"^[A-Z]{1,4096}$")]
    fingerprint: _Digest
    config_sha256: _Digest
    weights_sha256: _Digest
    versions: Annotated[dict[_Name, _Word], Field(max_length=64)]
    measures: list[_Name]
    process: Count = 0
    missing: list[Count] = []
    sums: dict[str, tuple[_Number, _Number, Annotated[int, Field(gt=0)]]] = {}
    overlap: list[list[Finite]] = []
    queries: Count = 0

    @field_validator("versions")
    @classmethod
    def _names_the_engine(cls, versions: dict[str, str]) -> dict[str, str]:
        lacking = [name for name in ("sglang", "torch") if name not in versions]
        if lacking:
            raise ValueError(f"has no version of {lacking[0]}")
        return versions

    @model_validator(mode="after")
    def _runs_what_it_says(self) -> Self:
        if Pattern(self.pattern).fingerprint != self.fingerprint:
            raise ValueError("the fingerprint is not that of the pattern")
        return self


OneRank = TypeVar("OneRank", bound=Rank)


class Ranks(Answer, Generic[OneRank]):
    """Answers with one entry per data-parallel rank."""

    ranks: list[OneRank]

    @field_validator("ranks")
    @classmethod
    def _once_each(cls, ranks: list[OneRank]) -> list[OneRank]:
        if len({rank.dp_rank for rank in ranks}) < len(ranks):
            raise ValueError("a data-parallel rank answers twice")
        return ranks


class LeaseState(Answer):
    """Answer about the lease of a server.

    Attributes:
        granted: whether the client that asks holds it.
        beats: how often it was given or renewed, whoever held it.
        host: the machine of the holder.
        process: the holder's id there.
        held_s: seconds since it was given.
        ends_in_s: seconds until it ends, unless it is renewed.
    """

    granted: bool
    beats: Count
    host: _Word = "?"
    process: Count = 0
    held_s: Annotated[Finite, Field(ge=0)] = 0.0
    ends_in_s: Annotated[Finite, Field(ge=0, le=LEASE_SECONDS)] = 0.0


class SeenLease(LeaseState):
    """The lease of a server as anybody sees it, who does not ask for it."""

    granted: bool = False

    @property
    def held(self) -> bool:
        """True if somebody holds it."""
        return "ends_in_s" in self.model_fields_set


class Status(Ranks[Rank]):
    """Answer about the state of a server; one that speaks version 1 has no `lease`."""

    lease: SeenLease | None = None


class _Meta(Answer):
    input_token_logprobs: list[_Token]
    input_top_logprobs: list[list[_Token] | None]


class Generated(Answer):
    """Answer of `/generate` to one prompt."""

    meta_info: _Meta


LEASE: TypeAdapter[LeaseState] = TypeAdapter(LeaseState)
STATUS: TypeAdapter[Status] = TypeAdapter(Status)
GENERATED: TypeAdapter[list[Generated]] = TypeAdapter(list[Generated])


@cache
def ranks_of(kind: type[OneRank]) -> TypeAdapter[Ranks[OneRank]]:
    """Return what reads answers whose entries are of one kind."""
    return TypeAdapter(Ranks[kind])  # type: ignore[valid-type]


def token_logprobs(answer: Generated, prompt: Sequence[int]) -> list[tuple[float, bool]]:
    """Return each token's logprob, and true if it is the likeliest; skip the first answered.

    Raises:
        ValueError: if the answer is about other tokens, or holds invalid logprobs.
    """
    own, best = answer.meta_info.input_token_logprobs[1:], answer.meta_info.input_top_logprobs[1:]
    if not same_tokens([token for _, token, _ in own], prompt) or len(best) != len(own) or not all(best):
        raise ValueError("without input logprobs of the tokens that were sent")
    pairs = []
    for (value, token, _), top in zip(own, best, strict=True):
        assert top
        most, likeliest, _ = top[0]
        if value > ROUNDING:
            raise ValueError("with a logprob above 0")
        if most < value - ROUNDING or (most > ROUNDING and not math.isnan(value)):
            raise ValueError("with a token that is likelier than the likeliest")
        pairs.append((value, token == likeliest))
    return pairs


def check_divergence(total: float, squares: float, count: int, expected: int) -> None:
    """Check the sum, sum of squares and count of a divergence.

    Raises:
        ValueError: if `expected` divergences can't add up to these.
    """
    if count != expected or total < -ROUNDING:
        raise ValueError(f"a divergence of {total} over {count} tokens, expected {expected}")
    if squares < 0 or total**2 > (squares + ROUNDING) * count * 1.001:
        raise ValueError(f"a divergence of {total} whose squares sum up to {squares} over {count} tokens")


def same_tokens(answered: Sequence[int], sent: Sequence[int]) -> bool:
    """Compare answered with sent tokens; SGLang 0.5.23 reports the vocabulary's last token as 0."""
    last = max(sent, default=0)
    return len(answered) == len(sent) and all(
        one == other or (one == 0 and other == last) for one, other in zip(answered, sent, strict=True)
    )
