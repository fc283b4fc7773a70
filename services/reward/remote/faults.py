"""What can go wrong with a request to a server: a kind for metrics, and what it means for the next try."""

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import StrEnum

from tidemill.services.reward.outcome import AttemptError


class FaultKind(StrEnum):
    NO_REPLICA = "no_replica"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"
    RATE_LIMITED = "rate_limited"
    REFUSED_REQUEST = "refused_request"
    GARBAGE = "garbage"
    NO_VERDICT = "no_verdict"


REPLICA_KINDS = (FaultKind.CONNECTION, FaultKind.TIMEOUT, FaultKind.SERVER_ERROR, FaultKind.GARBAGE)
"""The replica failed: it counts against it, and another one may do better."""
FINAL_KINDS = (FaultKind.NO_REPLICA, FaultKind.REFUSED_REQUEST)
"""Asking again cannot help: the request itself is wrong, or all patience is used up."""

DEFAULT_PAUSE_S = 1.0
"""For a server that says it is asked too often, and not when to come back."""
LONGEST_RETRY_AFTER_S = 600.0
"""A server may ask for any pause; a longer one is taken for this, or a run would stand still for it."""
SHOWN_CHARS = 200
CHARS_PER_TOKEN = 3
"""For estimates before a request; most languages have more. The answer corrects them."""


class RemoteFault(AttemptError):
    """One request that gave no value; `kind` is a `FaultKind`.

    Where it `asks_for_pause` the replica will answer later: that is no failure of its own, and none of the
    sample's.
    """

    def __init__(self, kind: FaultKind, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(
            message,
            is_timeout=kind is FaultKind.TIMEOUT,
            is_final=kind in FINAL_KINDS,
            kind=kind.value,
            retry_after_s=retry_after_s,
        )
        self.asks_for_pause = retry_after_s > 0.0
        self.is_replicas = kind in REPLICA_KINDS
        """Whether it counts against the replica."""
        self.replica_url = ""
        """Whose fault it was."""


def connection_fault(origin: str, error: BaseException) -> RemoteFault:
    return RemoteFault(FaultKind.CONNECTION, f"no answer from {origin}: {str(error) or type(error).__name__}")


def status_fault(origin: str, status: int, headers: Mapping[str, str], said: str) -> RemoteFault:
    message = f"{origin} answered {status}: {' '.join(said.split())[:SHOWN_CHARS]}"
    retry_after_s = retry_after(headers.get("retry-after", ""))
    if status == 429:
        return RemoteFault(FaultKind.RATE_LIMITED, message, retry_after_s=retry_after_s or DEFAULT_PAUSE_S)
    if status >= 500 or status == 408:
        return RemoteFault(FaultKind.SERVER_ERROR, message, retry_after_s=retry_after_s)
    return RemoteFault(FaultKind.REFUSED_REQUEST, message)


def retry_after(header: str) -> float:
    """Seconds from now that a Retry-After asks for, as a number or an HTTP date; 0 where it says nothing."""
    try:
        wanted_s = float(header)
    except ValueError:
        try:
            wanted_s = parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    # Python reads `nan` as a number, which `min` and `max` would pass on.
    return min(max(wanted_s, 0.0), LONGEST_RETRY_AFTER_S) if wanted_s == wanted_s else 0.0
