"""Which exceptions say that a machine is short of something, and when a worker takes messages again."""

import asyncio
import errno
import os

import httpx
import pytest
import torch

from tidemill.common.errors import MachineFaultError, StoreError
from tidemill.common.process import shortage
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.shortage import (
    NO_THREAD,
    SHORT,
    Shortage,
    fault_in,
    is_machine_fault,
    machine_faults,
    make_fault,
    number_in_text,
    shortage_number,
)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def raised_from(cause: BaseException, error: BaseException) -> BaseException:
    try:
        raise error from cause
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (os_error(errno.EAGAIN), errno.EAGAIN),
        (BlockingIOError(errno.EAGAIN, "fork"), errno.EAGAIN),
        (os_error(errno.EMFILE), errno.EMFILE),
        (os_error(errno.ENFILE), errno.ENFILE),
        (os_error(errno.ENOMEM), errno.ENOMEM),
        (os_error(errno.ENOSPC), errno.ENOSPC),
        (os_error(errno.EDQUOT), errno.EDQUOT),
        (MemoryError(), errno.ENOMEM),
        (RuntimeError(NO_THREAD), errno.EAGAIN),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), errno.EMFILE),
        (ImportError("libx.so: failed to map segment from shared object"), errno.ENOMEM),
        (raised_from(os_error(errno.EMFILE), httpx.ConnectError("all attempts failed")), errno.EMFILE),
        (ConnectionError(raised_from(os_error(errno.EMFILE), OSError("all attempts"))), errno.EMFILE),
        (ExceptionGroup("both", [ValueError(), os_error(errno.EMFILE)]), errno.EMFILE),
        (ImportError("libx.so: failed to map segment from shared object: Operation not permitted"), 0),
        (
            ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory"),
            errno.ENOMEM,
        ),
        (os_error(errno.ENOENT), 0),
        (os_error(errno.ECONNREFUSED), 0),
        (os_error(errno.EACCES), 0),
        (TimeoutError(), 0),
        (RuntimeError("cannot schedule new futures after shutdown"), 0),
        (ImportError("No module named 'x'"), 0),
        (StoreError("it does not answer"), 0),
    ],
)
def test_an_exception_says_what_the_machine_is_short_of_or_that_it_is_not(error, number):
    assert shortage_number(error) == number
    assert is_machine_fault(error) is bool(number)


def test_torch_says_by_its_text_that_memory_is_short():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert shortage_number(caught.value) == errno.ENOMEM


def test_a_chain_of_exceptions_may_be_a_ring():
    first = ValueError()
    second = ValueError()
    first.__cause__ = second
    second.__cause__ = first
    assert shortage_number(first) == 0


def test_an_exception_that_hides_its_context_says_nothing_of_it():
    with pytest.raises(ValueError) as caught:
        try:
            raise os_error(errno.EMFILE)
        except OSError:
            raise ValueError from None
    assert not is_machine_fault(caught.value)


def test_a_shell_says_it_in_words():
    assert number_in_text("sh: fork: Resource temporarily unavailable") == errno.EAGAIN
    assert number_in_text("sh: nosuchprogram: not found") == 0


def test_our_own_start_raises_a_fault_with_the_remedy_and_any_other_exception_passes():
    with pytest.raises(MachineFaultError) as caught, machine_faults("the process could not be started"):
        raise os_error(errno.EMFILE)
    assert caught.value.number == errno.EMFILE
    assert "ulimit -n" in str(caught.value) and "the process could not be started" in str(caught.value)
    with pytest.raises(FileNotFoundError), machine_faults("the process could not be started"):
        raise FileNotFoundError(errno.ENOENT, "no such program")


def test_memory_that_only_one_sample_lacks_is_no_fault_of_the_machine(monkeypatch):
    monkeypatch.setattr(shortage, "find_shortage", lambda: None)
    assert fault_in(MemoryError(), "a reward could not be computed") is None
    short = make_fault(errno.ENOMEM, "no memory could be taken", "MemoryError")
    monkeypatch.setattr(shortage, "find_shortage", lambda: short)
    assert fault_in(MemoryError(), "a reward could not be computed") is not None
    # Other things are not wanted by a sample alone: no second look is needed.
    monkeypatch.setattr(shortage, "find_shortage", lambda: None)
    assert fault_in(os_error(errno.EMFILE), "no connection") is not None


FAULT = make_fault(errno.EAGAIN, "a process could not be started", "BlockingIOError: [Errno 11]")


class Machine:
    """A machine whose starts fail `num_short` times."""

    def __init__(self, num_short: int) -> None:
        self.num_short = num_short
        self.pauses: list[float] = []

    def probe(self) -> MachineFaultError | None:
        self.num_short -= 1
        return FAULT if self.num_short >= 0 else None


@pytest.fixture
def pauses(monkeypatch):
    """The pauses before each try, which take no time."""
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    monkeypatch.setattr(shortage.asyncio, "sleep", sleep)
    return slept


async def test_no_messages_are_taken_until_a_start_works_and_pauses_grow(pauses):
    watched = Shortage("w1", Machine(5).probe)
    assert not watched.is_short
    watched.note(FAULT)
    assert watched.is_short
    # Two lanes wait for the same tries.
    await asyncio.gather(watched.until_over(), watched.until_over())
    assert not watched.is_short
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0]


async def test_a_shortage_soon_after_the_last_goes_on_with_its_pauses(pauses, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(shortage.time, "monotonic", lambda: now[0])
    watched = Shortage("w1", Machine(0).probe)
    for later_s in (0.0, 1.0, shortage.FORGET_S + 1.0):
        now[0] += later_s
        watched.note(FAULT)
        await watched.until_over()
    assert pauses == [0.5, 1.0, 0.5]


async def test_a_lane_that_stops_does_not_end_the_tries_of_the_others(pauses):
    watched = Shortage("w1", Machine(2).probe)
    watched.note(FAULT)
    stopped = asyncio.ensure_future(watched.until_over())
    others = asyncio.ensure_future(watched.until_over())
    stopped.cancel()
    await others
    assert not watched.is_short


async def test_it_is_said_at_once_and_at_doublings_and_the_heartbeat_says_why(capfd, pauses):
    watched = Shortage("w1", Machine(0).probe)
    for _ in range(20):
        watched.note(FAULT)
    assert capfd.readouterr().out.count("this machine is short of something") == 5  # 1, 2, 4, 8, 16
    beat = Heartbeat("w1", "reward", detail="2 of 3 replicas up")
    watched.report(beat)
    assert beat.counts[SHORT] == 1.0
    assert beat.detail.startswith("takes no samples: a process could not be started")
    assert beat.detail.endswith("; 2 of 3 replicas up")
    (failure,) = beat.failures
    assert (failure.what, failure.kind, failure.count) == ("the machine of w1", SHORT, 20)
    assert "ulimit -u" in failure.reason
    await watched.until_over()
    after = Heartbeat("w1", "reward")
    watched.report(after)
    assert after.counts[SHORT] == 0.0 and after.detail == ""
    # What has happened stays visible.
    assert after.failures[0].count == 20
