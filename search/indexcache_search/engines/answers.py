"""What a calibration server answers, parsed once: types, ranges, and what has to add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from sglang_indexcache import Pattern
from sglang_indexcache.files.fields import Count, Finite
from sglang_indexcache.http.redaction import redacted

ROUNDING = 1e-3  # nats by which a sum that can't be negative may be
_MOST_RANKS = 1 << 16

_Number = Finite | None  # JSON has null where a number is not finite
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
_Word = Annotated[str, Field(pattern=r"^[ -~]{1,200}$"), AfterValidator(redacted)]  # it gets into files
_Token = tuple[_Number, Count, Any]  # logprob, id, text


class _Frozen(BaseModel):
    """Answers may say more than is asked for: SGLang's do with every version."""

    model_config = ConfigDict(frozen=True)


class Rank(_Frozen):
    """What one data-parallel rank answers to a control request: what it runs, and what it was asked for.

    Attributes:
        pattern: roles; `fingerprint` is theirs.
        weights_sha256: digest of the checkpoint that it has loaded.
        versions: what losses depend on beside the pattern.
        missing: sequences whose baseline is still to be run.
        sums: sum, sum of squares and count of the divergence, by request.
        misses: tokens that buffers would miss, by layer that chooses and by their sizes.
    """

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
    misses: dict[Count, list[Count]] = {}

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


class Ranks(_Frozen):
    """One entry a data-parallel rank."""

    ranks: list[Rank]

    @field_validator("ranks")
    @classmethod
    def _once_each(cls, ranks: list[Rank]) -> list[Rank]:
        if len({rank.dp_rank for rank in ranks}) < len(ranks):
            raise ValueError("a data-parallel rank answers twice")
        return ranks


class _Meta(_Frozen):
    input_token_logprobs: list[_Token]
    input_top_logprobs: list[list[_Token] | None]


class Generated(_Frozen):
    """One answer of `/generate` to a prompt."""

    meta_info: _Meta


RANKS: TypeAdapter[Ranks] = TypeAdapter(Ranks)
GENERATED: TypeAdapter[list[Generated]] = TypeAdapter(list[Generated])


def token_logprobs(answer: Generated, prompt: Sequence[int]) -> list[tuple[float, bool]]:
    """Logprob, NaN for null, and whether it is the likeliest, of each token of `prompt`; the first answered has none.

    Raises:
        ValueError: if the answer is about other tokens, or holds what no logprobs are.
    """
    own, best = answer.meta_info.input_token_logprobs[1:], answer.meta_info.input_top_logprobs[1:]
    if not same_tokens([token for _, token, _ in own], prompt) or len(best) != len(own) or not all(best):
        raise ValueError("without input logprobs of the tokens that were sent")
    pairs = []
    for (value, token, _), top in zip(own, best, strict=True):
        assert top
        most = top[0][0]
        if value is not None and value > ROUNDING:
            raise ValueError("with a logprob above 0")
        if value is not None and most is not None and not value - ROUNDING <= most <= ROUNDING:
            raise ValueError("with a token that is likelier than the likeliest")
        pairs.append((_number(value), token == top[0][1]))
    return pairs


def divergence(total: float | None, squares: float | None, count: int, *, expected: int) -> tuple[float, float, int]:
    """Sum, sum of squares and count of a divergence; NaN for null.

    Raises:
        ValueError: if no `expected` divergences sum up to that.
    """
    if count != expected or (total is not None and total < -ROUNDING):
        raise ValueError(f"a divergence of {total} over {count} tokens, expected {expected}")
    if squares is not None and (squares < 0 or (total is not None and total**2 > (squares + ROUNDING) * count * 1.001)):
        raise ValueError(f"a divergence of {total} whose squares sum up to {squares} over {count} tokens")
    return _number(total), _number(squares), count


def same_tokens(answered: Sequence[int], sent: Sequence[int]) -> bool:
    """Whether the answer is about the tokens that were sent: SGLang 0.5.23 calls the vocabulary's last one 0."""
    last = max(sent, default=0)
    return len(answered) == len(sent) and all(
        one == other or (one == 0 and other == last) for one, other in zip(answered, sent, strict=True)
    )


def _number(value: float | None) -> float:
    """JSON has null where a number is not finite."""
    return math.nan if value is None else value
