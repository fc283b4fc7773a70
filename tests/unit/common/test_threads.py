"""Calls that may wait long for what lies outside have threads of their own."""

import asyncio
import threading
from contextvars import ContextVar
from pathlib import Path

import pytest

from tests.support.preloaded import REPO
from tidemill.common.threads import BoundedThreads

WHO = ContextVar("WHO", default="nobody")
OUTSIDE = [
    "common/archive",
    "common/history",
    "common/redis",
    "common/store",
    "services/reward/rewards",
    "services/rollout/weight_follower.py",
    "services/rollout/worker.py",
    "services/trainer/durable",
    "services/trainer/trainer.py",
]
"""Code that waits for object stores, shared folders, or servers, by calls that block."""


async def test_a_call_has_the_callers_context_and_one_of_so_many_threads():
    threads = BoundedThreads("outside", 2)
    both = threading.Barrier(3)
    release = threading.Event()
    WHO.set("caller")

    def call() -> tuple[str, str]:
        both.wait(60)
        release.wait(60)
        return WHO.get(), threading.current_thread().name

    first = asyncio.create_task(threads.run(call))
    second = asyncio.create_task(threads.run(call))
    await asyncio.to_thread(both.wait, 60)
    waiting = asyncio.create_task(threads.run(pytest.fail, "it was cancelled before it began"))
    await asyncio.sleep(0)
    waiting.cancel()
    release.set()
    assert {await first, await second} == {("caller", "outside_0"), ("caller", "outside_1")}
    assert await threads.run(WHO.get) == "caller"


async def test_an_error_comes_to_the_caller():
    with pytest.raises(ZeroDivisionError):
        await BoundedThreads("outside", 1).run(divmod, 1, 0)


@pytest.mark.parametrize("room", OUTSIDE)
def test_what_waits_for_the_outside_does_not_use_the_threads_that_everybody_shares(room):
    path = REPO / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    assert [file for file in files if "to_thread" in code_of(file)] == []


def code_of(file: Path) -> str:
    return file.read_text("utf-8").replace("`asyncio.to_thread`", "")
