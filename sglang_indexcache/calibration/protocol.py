"""The protocol of a calibration server and its client: routes, actions, status codes, and ids of measured requests.

`POST /indexcache/{action}` with a JSON body answers `{"ranks": [...]}`, one entry a data-parallel rank, or
`{"error": "..."}`. All actions but `status` are for the one client that holds the lease: their body has its `token`,
and `protocol`, the version that it speaks. Every entry has `boot` and `switches`: if both are what they were, nobody
switched the pattern in between. The id of a request says what is measured on its forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from uuid import uuid4

from sglang_indexcache.io.errors import one_line

VERSION = 2  # of this protocol: 1 had no lease
STATUS, CHECK, SWITCH = "status", "check", "switch"
LEASE, RELEASE = "lease", "release"
BASELINE, KL, SAMPLE, OVERLAP = "baseline", "kl", "sample", "overlap"
KEEP = "keep"  # on a request: the baseline's hidden states
BAD_REQUEST, CONFLICT, LOCKED = int(HTTPStatus.BAD_REQUEST), int(HTTPStatus.CONFLICT), int(HTTPStatus.LOCKED)
LEASE_SECONDS = 60.0  # the longest time that a lease outlives its client

Range = tuple[int, int]
"""Positions of a sequence, the last one excluded."""

_TAG = 16  # characters of a data set's digest in the id of a request
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


def differing(server: object, client: object) -> str:
    """Return the error of two ends that speak different versions of this protocol."""
    return (
        f"the server speaks version {one_line(server, 20)} of the calibration protocol, the client version"
        f" {one_line(client, 20)}; expected the same sglang-indexcache on both"
    )


def tag(data: str) -> str:
    """Return what stands for a data set in the id of a request."""
    return data[:_TAG]


@dataclass(frozen=True)
class Measured:
    """A measurement on a request.

    Attributes:
        what: `keep` the baseline's hidden states, or the name of a `Measure`, such as `kl` to them or index `overlap`.
        sequence: number of the sequence in the data set.
        data: `tag` of the data set, so that nothing of another one is taken for it.
        nonce: makes the id unique among all requests.
    """

    what: str
    sequence: int
    data: str
    nonce: str

    @classmethod
    def new(cls, what: str, sequence: int, data: str) -> Measured:
        """Create one more request that measures `what` on a sequence of the data set with the digest `data`."""
        return cls(what, sequence, tag(data), uuid4().hex)

    @property
    def rid(self) -> str:
        """Request id that says so."""
        return f"{_PREFIX}:{self.what}:{self.sequence}:{self.data}:{self.nonce}"

    @classmethod
    def parse(cls, rid: str) -> Measured | None:
        """Read the measurement from `rid`; `None` for an ordinary request."""
        words = rid.split(":")
        if len(words) != 5 or words[0] != _PREFIX or not words[1] or not words[2].isdecimal():
            return None
        return cls(words[1], int(words[2]), words[3], words[4])
