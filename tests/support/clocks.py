"""A clock that a test moves, and a Redis whose clock was set back: its deliveries lie in the future."""

from tidemill.common.redis.broker import Broker

POLYNOMIAL = 0x95AC9329AC4BC9B5
"""Polynomial of Redis's CRC-64 (Jones), its bits reversed."""


JUST_NOW_MS = 10_000


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def set_clock_back(broker: Broker, key: str, group: str, by_s: float) -> None:
    """Change the stream as if the server's clock had been set back after the deliveries of just now."""
    now_ms = int(1000 * await broker.server_time_s())
    dump = await broker.execute("DUMP", key)
    body = dump[:-10]
    version = dump[-10:-8]
    for delivered_ms in range(now_ms - JUST_NOW_MS, now_ms + 1):
        later = (delivered_ms + int(1000 * by_s)).to_bytes(8, "little")
        body = body.replace(delivered_ms.to_bytes(8, "little"), later)
    await broker.execute("RESTORE", key, 0, _with_checksum(body + version), "REPLACE")
    held = await broker.execute("XPENDING", key, group, "-", "+", 100)
    assert held
    assert all(idle_ms == 0 for _, _, idle_ms, _ in held), "no delivery lies in the past"


def _with_checksum(data: bytes) -> bytes:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return data + crc.to_bytes(8, "little")
