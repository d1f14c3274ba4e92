"""The protocol of a calibration server and its client: routes, actions, status codes, and ids of measured requests.

`POST /indexcache/{action}` with a JSON body answers `{"ranks": [...]}`, one entry a data-parallel rank, or
`{"error": "..."}`. The id of a request says what is measured on its forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from uuid import uuid4

STATUS, CHECK, SWITCH = "status", "check", "switch"
BASELINE, KL, SAMPLE, OVERLAP = "baseline", "kl", "sample", "overlap"
RECORD, MISSES = "record", "misses"
KEEP = "keep"  # on a request: the baseline's hidden states
BAD_REQUEST, CONFLICT = int(HTTPStatus.BAD_REQUEST), int(HTTPStatus.CONFLICT)

Range = tuple[int, int]
"""Positions of a sequence, the last one excluded."""

_MEASURED = (KEEP, KL, OVERLAP, MISSES)
_BUSY = "busy: "
_PREFIX = "indexcache"


def path(action: str) -> str:
    """Return the route of an action."""
    return f"/indexcache/{action}"


def busy(reason: str) -> str:
    """Return an error that will pass: the same request may be made again."""
    return f"{_BUSY}{reason}"


def status_code(error: str) -> int:
    """Return the status code of an error: SGLang hands errors from its schedulers on as text alone."""
    return CONFLICT if error.startswith(_BUSY) else BAD_REQUEST


@dataclass(frozen=True)
class Measured:
    """A measurement on a request.

    Attributes:
        what: `keep` the baseline's hidden states, `kl` to them, index `overlap`, or the `misses` of a buffer.
        sequence: number of the sequence in the data set that the control request announced.
        nonce: makes the id unique among all requests.
    """

    what: str
    sequence: int
    nonce: str

    @classmethod
    def new(cls, what: str, sequence: int) -> Measured:
        """Create one more request that measures `what`."""
        return cls(what, sequence, uuid4().hex)

    @property
    def rid(self) -> str:
        """Request id that says so."""
        return f"{_PREFIX}:{self.what}:{self.sequence}:{self.nonce}"

    @classmethod
    def parse(cls, rid: str) -> Measured | None:
        """Read the measurement from `rid`; `None` for an ordinary request."""
        words = rid.split(":")
        if len(words) != 4 or words[0] != _PREFIX or words[1] not in _MEASURED or not words[2].isdecimal():
            return None
        return cls(words[1], int(words[2]), words[3])
