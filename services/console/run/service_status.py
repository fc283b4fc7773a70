"""What the console knows of a process that it keeps alive."""

from dataclasses import dataclass


@dataclass(slots=True)
class ServiceStatus:
    """What the live view shows of a process besides its heartbeat.

    Example: `name` "rollout-0", `state` "running", `pid` 4711, `restarts` 1.
    """

    name: str
    role: str
    state: str = "starting"
    pid: int = 0
    restarts: int = 0
