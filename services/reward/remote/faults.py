"""Failures of requests to servers: a kind for metrics, and what it means for the next attempt."""

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
"""Failures that count against the replica; another one may answer."""
FINAL_KINDS = (FaultKind.NO_REPLICA, FaultKind.REFUSED_REQUEST)
"""Not retryable: the request itself is wrong, or no replica could be used within `patience_s`."""

DEFAULT_PAUSE_S = 1.0
"""Pause after a 429 without Retry-After."""
LONGEST_RETRY_AFTER_S = 600.0
"""Longest pause that a server may impose; a longer Retry-After is cut to it, or the run would stall."""
SHOWN_CHARS = 200
CHARS_PER_TOKEN = 3
"""Assumed for estimates before a request; the usage in the answer corrects them."""


class RemoteFault(AttemptError):
    """One request that gave no value; `kind` is a `FaultKind`.

    If it `asks_for_pause`, the replica asked for a later retry: no attempt is lost while `patience_s` lasts.
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
        """URL of the replica that was asked."""


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
