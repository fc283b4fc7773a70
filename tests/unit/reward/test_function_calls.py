"""Calls of an async function in its process: which answers go together."""

import asyncio
import contextlib
import socket
from traceback import FrameSummary
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S
from tidemill.common.process.children import frame_of
from tidemill.services.reward.functions import child, reward_function
from tidemill.services.reward.functions.child import LoopCalls
from tidemill.services.reward.functions.request import Callee, Request
from tidemill.services.reward.outcome import RewardOutcome

SAMPLE = {"ticket": 0, "step": 0, "text": "", "ids": b""}


class Index(Callee):
    """The reward is the sample's index."""

    name = "index"
    is_async = True
    is_cheap = False

    def spec(self) -> dict[str, Any]:
        return {}

    async def call(self, request: Request) -> list[RewardOutcome]:
        await asyncio.sleep(0)
        return [RewardOutcome(float(sample.key[1])) for sample in request.samples]


def frame(file: str, line: int, name: str) -> FrameSummary:
    return FrameSummary(file, line, name)


OURS = frame(str(reward_function.__file__), 9, "call")
MINE = frame("/home/me/mine.py", 3, "judge")
IN_A_FOLDER_LIKE_OURS = frame("/home/me/asyncio/services/reward/mine.py", 3, "judge")
SLEEP = frame(str(asyncio.tasks.__file__), 1, "sleep")
DECORATOR = frame(str(pytest.__file__), 1, "wrapped")


@pytest.mark.parametrize(
    ("inside", "where"),
    [
        ([MINE], "judge (mine.py, line 3)"),
        ([IN_A_FOLDER_LIKE_OURS, SLEEP], "judge (mine.py, line 3), in sleep (tasks.py, line 1)"),
        ([DECORATOR, MINE, SLEEP], "judge (mine.py, line 3), in sleep (tasks.py, line 1)"),
        ([DECORATOR, SLEEP], "wrapped (__init__.py, line 1), in sleep (tasks.py, line 1)"),
        ([MINE, frame("/lib/ssl.py", 7, "load")], "judge (mine.py, line 3), in load (ssl.py, line 7)"),
        # Made while the program runs: there is no such line to look at.
        ([MINE, frame("<string>", 0, "<module>")], "judge (mine.py, line 3)"),
        (
            [MINE, frame("<frozen importlib._bootstrap>", 1, "_load"), frame("/lib/torch.py", 1, "<module>")],
            "judge (mine.py, line 3), while importing; import at the top of the file, which counts against "
            "no call",
        ),
        ([frame("<string>", 0, "<module>")], "call (reward_function.py, line 9)"),
    ],
)
def test_a_call_that_takes_long_is_named_by_a_line_that_can_be_looked_at(inside, where):
    assert child._where([OURS, *inside]) == where


def sent(num_calls: int) -> list[list[float]]:
    """The rewards in each write of a process that runs one call at a time, all of which came at once."""
    writes: list[list[float]] = []
    all_sent = asyncio.Event()

    def note(*frames: dict[str, Any]) -> None:
        writes.append([frame["outcomes"][0]["value"] for frame in frames])
        if sum(map(len, writes)) == num_calls:
            all_sent.set()

    async def read_all() -> None:
        calls._read()
        async with asyncio.timeout(PATIENCE_S):
            await all_sent.wait()

    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = LoopCalls(Index(), note, theirs, at_once=1)
        for index in range(num_calls):
            call = {"lane": "train", "samples": [{**SAMPLE, "index": index}]}
            ours.sendall(frame_of({"id": index + 1, "call": call, "timeout_s": 60.0}))
        with contextlib.closing(calls._loop) as loop:
            loop.run_until_complete(read_all())
    return writes


def test_answers_wait_while_half_as_many_calls_wait_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sends further calls once it has the answers; no place should be empty until they come."""
    monkeypatch.setattr(child, "GATHER_SHARE", 1e9)
    monkeypatch.setattr(child, "LONGEST_GATHER_S", 3600.0)
    writes = sent(7)
    assert writes[0] == [0.0, 1.0, 2.0, 3.0, 4.0], "two calls are left: one runs, one waits for a place"
    assert sorted(reward for write in writes for reward in write) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_an_answer_is_sent_at_once_where_no_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GATHER_SHARE", 1e9)
    monkeypatch.setattr(child, "LONGEST_GATHER_S", 3600.0)
    assert sent(1) == [[0.0]]


def test_a_late_call_that_has_not_begun_is_not_said_to_wait_in_a_line() -> None:
    """As where calls before it block the loop: `it waited` would name a line of this program."""
    answers: list[dict[str, Any]] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = LoopCalls(Index(), lambda *frames: answers.extend(frames), theirs, at_once=1)
        with contextlib.closing(calls._loop) as loop:
            calls._begin({"id": 1, "call": {"lane": "train", "samples": [SAMPLE]}, "timeout_s": 60.0})
            call = calls._running[1]
            calls._fail_late(1, call)
            loop.run_until_complete(asyncio.wait({call.task}))
    (answer,) = answers
    assert answer["failure"]["status"] == "timeout" and "no result within 60 s" in answer["failure"]["error"]
    assert "it waited" not in answer["failure"]["error"]
    assert call.task.cancelled()
