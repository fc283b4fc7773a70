"""What can go wrong with a request to a server: a kind for metrics, and what it means for the next try."""

from enum import StrEnum

from services.reward.outcome import AttemptError


class FaultKind(StrEnum):
    """Labels of `tidemill_remote_errors_total`."""

    NO_REPLICA = "no_replica"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"
    RATE_LIMITED = "rate_limited"
    REFUSED_REQUEST = "refused_request"
    GARBAGE = "garbage"
    NO_VERDICT = "no_verdict"


REPLICA_KINDS = (FaultKind.CONNECTION, FaultKind.TIMEOUT, FaultKind.SERVER_ERROR)
"""The replica failed: it counts against it, and another one may do better."""
FAILOVER_KINDS = (*REPLICA_KINDS, FaultKind.RATE_LIMITED, FaultKind.GARBAGE)
FINAL_KINDS = (FaultKind.NO_REPLICA, FaultKind.REFUSED_REQUEST)
"""Asking again cannot help: the request itself is wrong, or all patience is used up."""


class RemoteFault(AttemptError):
    """One request that gave no value."""

    def __init__(self, fault: FaultKind, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(
            message,
            is_timeout=fault is FaultKind.TIMEOUT,
            is_final=fault in FINAL_KINDS,
            kind=fault.value,
            retry_after_s=retry_after_s,
        )
        self.fault = fault

    @property
    def is_replicas(self) -> bool:
        """Whether it counts against the replica."""
        return self.fault in REPLICA_KINDS

    @property
    def may_fail_over(self) -> bool:
        """Whether another replica should be asked at once."""
        return self.fault in FAILOVER_KINDS
