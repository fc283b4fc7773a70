"""Reward functions that do what their sample says, and pools of processes for them."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

from tests.support.samples import make_sample
from tidemill.common.wire.messages import Score
from tidemill.services.reward.functions.pool import ProcessPool
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import load_function
from tidemill.services.reward.outcome import RewardOutcome

SOURCE = """
    import asyncio, ctypes, os, signal, subprocess, sys, threading, time
    from pathlib import Path

    FOLDER = Path({folder!r})

    def answer(started):
        is_main = threading.current_thread() is threading.main_thread()
        times = {{"started": started, "ended": time.monotonic()}}
        return {{"score": 1.0, "pid": os.getpid(), "main": is_main, **times}}

    def plain(data_source, solution_str, ground_truth, extra_info=None):
        started = time.monotonic()
        (FOLDER / f"{{ground_truth}}.pid").write_text(str(os.getpid()))
        exec(solution_str)
        return answer(started)

    async def awaited(data_source, solution_str, ground_truth, extra_info=None):
        started = time.monotonic()
        (FOLDER / f"{{ground_truth}}.pid").write_text(str(os.getpid()))
        found = {{}}
        body = "".join(f"    {{line}}\\n" for line in solution_str.split("\\n"))
        exec("async def code():\\n" + body, globals(), found)
        await found["code"]()
        return answer(started)
"""


def obedient_functions(folder: Path) -> Path:
    """A file with `plain` and `awaited`, which run their sample's text as code."""
    path = folder / "obedient.py"
    path.write_text(dedent(SOURCE).format(folder=str(folder)))
    return path


HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(3600)"
"""Sleeps with the GIL, like a regular expression that never ends: no other thread of the process can run."""


class Pool(ProcessPool):
    """Processes that are asked for one sample at a time."""

    def __init__(self, reference: str, size: int = 1, threads: int = 1, is_async: bool = False) -> None:
        spec = {"maker": f"{load_function.__module__}:load_function", "reference": reference, "kwargs": {}}
        super().__init__(spec, size, threads, is_async)

    async def score(
        self, code: str, timeout_s: float = 60, name: str = "sample", index: int = 0
    ) -> RewardOutcome:
        (outcome,) = await self.run(Request([make_sample((0, index), False, "", code, name)]), timeout_s)
        return outcome


def peak(outcomes: Sequence[RewardOutcome | Score]) -> int:
    """How many of the calls ran at once, at most."""
    moments = [(float(outcome.components["started"] or 0), 1) for outcome in outcomes]
    moments += [(float(outcome.components["ended"] or 0), -1) for outcome in outcomes]
    running = highest = 0
    for _, change in sorted(moments):
        running += change
        highest = max(highest, running)
    return highest
