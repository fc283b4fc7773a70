"""The clocks of all machines: one true time, and each machine's offset from it."""

from dataclasses import dataclass

from tests.simulation.loop import OWNER, SimulatedLoop

EPOCH_S = 1_800_000_000.0
"""The wall clock at second 0 of the loop."""


@dataclass
class Clocks:
    """The offsets of hosts' clocks are in their processes, that of Redis's clock is here."""

    loop: SimulatedLoop
    server_offset_s: float = 0.0

    def wall_s(self) -> float:
        """What `time.time()` returns to the running process."""
        return EPOCH_S + self.loop.now + self._slept_s() + OWNER.get(self.loop.world).wall_offset_s

    def monotonic_s(self) -> float:
        return self.loop.now + self._slept_s()

    def server_ms(self) -> int:
        """Redis's clock."""
        return int(1000 * (EPOCH_S + self.loop.now + self.server_offset_s))

    def sleep(self, seconds: float) -> None:
        """`time.sleep` of a thread: its result comes later."""
        self.loop.slept_s += max(0.0, seconds)

    def _slept_s(self) -> float:
        return self.loop.slept_s if self.loop.in_thread else 0.0
