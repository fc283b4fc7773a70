"""What ranks write together is complete on all of them, or given up by all of them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tidemill.common.files import StorageError
from tidemill.services.trainer.weights.peers import PeerError, Thread, write_together


class Pair:
    """Two ranks, each in a thread; one that never calls `gather` breaks the other's."""

    size = 2

    def __init__(self, rank: int, payloads: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._payloads = payloads
        self._barrier = barrier

    def gather(self, payload: bytes, thread: Thread = "policy") -> list[bytes]:
        self._payloads[self.rank] = payload
        self._barrier.wait(10.0)
        return list(self._payloads)


def write_on_both(folder: Path, *writes: Callable[[], Any]) -> list[Future[list[Any]]]:
    payloads = [b"", b""]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        return [
            threads.submit(
                write_together, Pair(rank, payloads, barrier), "weights", "a version", folder, write
            )
            for rank, write in enumerate(writes)
        ]


def failing(error: Exception) -> Callable[[], Any]:
    def write() -> None:
        raise error

    return write


def test_each_rank_gets_what_all_have_written(tmp_path: Path) -> None:
    results = write_on_both(tmp_path, lambda: {"bytes": 1}, lambda: {"bytes": 2})
    assert [result.result() for result in results] == [[{"bytes": 1}, {"bytes": 2}]] * 2


def test_a_disk_that_takes_one_ranks_part_not_is_an_error_of_both(tmp_path: Path) -> None:
    for result in write_on_both(tmp_path, lambda: None, failing(OSError(28, "No space left on device"))):
        with pytest.raises(StorageError, match=r"No space left on device \(rank 1\)"):
            result.result()


@pytest.mark.parametrize("second", [lambda: None, failing(OSError(28, "No space left on device"))])
def test_no_rank_waits_for_one_that_failed_otherwise(tmp_path: Path, second: Callable[[], Any]) -> None:
    failed, waiting = write_on_both(tmp_path, failing(MemoryError("no room")), second)
    with pytest.raises(MemoryError, match="no room"):
        failed.result()
    with pytest.raises(PeerError, match="rank 0 could not write a version: MemoryError: no room"):
        waiting.result()
