"""Turns on a shared device: never both at once, nobody starves, a dead holder holds up nobody.

Locks and gates by themselves, an engine and a reward model, and whole runs of trainer and workers.
"""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.preloaded import REPO
from tests.support.reward_models import server_url, start_server, tiny_classifier
from tests.support.runs import SERVICES, ServiceRun, simulated_config
from tests.support.waiting import wait_until
from tidemill.common.process.gpu_sharing import LOCKS_DIR_VARIABLE, GpuGate, GpuLock, lock_files
from tidemill.common.run.state import EVALUATION, METRICS_FILE, read_records
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import GenerationRequest
from tidemill.services.rollout.engines.gpu_sharing import GpuSharingEngine

HOLDER = """
import asyncio, sys
from pathlib import Path
from tidemill.common.process.gpu_sharing import GpuLock
async def main():
    await GpuLock([Path(sys.argv[1])]).acquire()
    print("held", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


class Device:
    """Counts who is on it."""

    def __init__(self) -> None:
        self.on: set[str] = set()
        self.turns: list[str] = []

    def gate(self, name: str, path: Path, turn_s: float) -> GpuGate:
        async def wake() -> None:
            await asyncio.sleep(0.01)
            assert not self.on, f"{name} wakes while {self.on} is on the device"
            self.on.add(name)
            self.turns.append(name)

        async def sleep() -> None:
            await asyncio.sleep(0.01)
            self.on.discard(name)

        return GpuGate(GpuLock([path]), wake, sleep, turn_s)


async def test_two_that_always_have_work_take_turns(tmp_path: Path) -> None:
    device = Device()
    done = {"a": 0, "b": 0}
    gates = {name: device.gate(name, tmp_path / "device-0", 0.1) for name in done}
    keepers = [gate.start() for gate in gates.values()]

    async def work(name: str) -> None:
        while min(done.values()) < 20:
            async with gates[name].use():
                assert device.on == {name}
                await asyncio.sleep(0.02)
                assert device.on == {name}
                done[name] += 1

    async with asyncio.timeout(120):
        await asyncio.gather(*(work(name) for name in ("a", "a", "b", "b")))
    assert not any(keeper.done() for keeper in keepers)
    assert all(first != second for first, second in zip(device.turns, device.turns[1:], strict=False))
    for gate in gates.values():
        await gate.close()


async def test_who_is_alone_keeps_the_device_and_who_is_idle_hands_it_over(tmp_path: Path) -> None:
    device = Device()
    busy = device.gate("busy", tmp_path / "device-0", 3600.0)
    rare = device.gate("rare", tmp_path / "device-0", 3600.0)
    busy.start()
    rare.start()
    for _ in range(5):
        async with busy.use():
            await asyncio.sleep(0.02)
    assert device.turns == ["busy"]
    async with asyncio.timeout(30), rare.use():  # long before busy's turn is over: it has nothing to do
        assert device.on == {"rare"}
    await busy.close()
    await rare.close()


async def test_a_holder_that_is_killed_frees_the_device_and_its_children_do_not_keep_it(tmp_path):
    path = tmp_path / "device-0"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(path), cwd=REPO, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 120) == b"held\n"
    turn = GpuLock([path])
    waiting = GpuLock([path])
    acquiring = asyncio.create_task(turn.acquire())
    await wait_until(lambda: waiting.is_wanted())
    assert not acquiring.done()
    process.kill()
    await process.wait()
    await asyncio.wait_for(acquiring, 120)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        turn.release()  # the child has no part in it
        await asyncio.wait_for(waiting.acquire(), 120)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)  # noqa: ASYNC222 (it was killed)
    waiting.release()


async def test_two_that_share_several_devices_do_not_wait_for_each_other(tmp_path: Path) -> None:
    files = [tmp_path / "device-0", tmp_path / "device-1"]
    both = [GpuLock(files), GpuLock(files[::-1])]

    async def take(turn: GpuLock) -> None:
        for _ in range(10):
            await turn.acquire()
            await asyncio.sleep(0)
            turn.release()

    async with asyncio.timeout(120):
        await asyncio.gather(*map(take, both))


async def test_what_stands_still_is_handed_over_unfinished_and_wants_the_device_back(tmp_path: Path) -> None:
    device = Device()
    path = tmp_path / "device-0"
    still = device.gate("still", path, 0.05)
    second = device.gate("other", path, 3600.0)
    still._stands_still = True
    still.start()
    second.start()
    async with asyncio.timeout(60), still.use():
        async with second.use():  # it has it, though work is under way there
            assert device.on == {"other"} and not still.is_open
            leave = second.stay()
        assert device.on == {"other"}
        await asyncio.sleep(0.05)
        assert device.on == {"other"}, "it stays after its work"
        leave()
        await wait_until(lambda: still.is_open)  # without that anybody asked again
        assert device.on == {"still"}
    await still.close()
    await second.close()


async def test_a_device_that_cannot_be_entered_fails_who_waits_for_it(tmp_path: Path) -> None:
    async def fail() -> None:
        raise RuntimeError("out of memory")

    gate = GpuGate(GpuLock([tmp_path / "device-0"]), fail, fail, 1.0)
    gate.start()
    with pytest.raises(Exception, match="out of memory"):
        async with asyncio.timeout(120), gate.use():
            pass
    second = GpuLock([tmp_path / "device-0"])
    await asyncio.wait_for(second.acquire(), 120)
    second.release()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A real reward model server that shares the device of this test."""
    path = tiny_classifier(tmp_path / "reward-model")
    arguments = ["--share-device", "--turn-s", "0.2", "--served-model-name", "rm"]
    process = start_server(path, tmp_path / "log", *arguments, **{LOCKS_DIR_VARIABLE: str(tmp_path)})
    try:
        yield await wait_until(lambda: server_url(tmp_path / "log"), 120), process
    finally:
        process.kill()
        process.wait()


async def test_an_engine_and_a_reward_model_share_a_device_until_the_model_dies(
    server, tmp_path, monkeypatch
):
    url, process = server
    monkeypatch.setenv(LOCKS_DIR_VARIABLE, str(tmp_path))
    assert lock_files() == [tmp_path / "device-0"]
    config = simulated_config(
        tmp_path,
        rollout__gpu_turn_s=0.2,
        rollout__simulated={"group_s": 0.03, "tokens": 4},
        reward={"rewards": {"rm": {"model": {"servers": "rm"}}}},
        servers={"rm": {"model": "rm", "local": {"shares_rollout_gpus": True}}},
    )
    engine = build_engine(config)
    assert isinstance(engine, GpuSharingEngine)
    await engine.start()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        unlocked = 0
        finished = {"generate": 0, "score": 0}

        async def generate() -> None:
            while min(finished.values()) < 6:
                await engine.generate(GenerationRequest("r", [1], SamplingParams(max_tokens=4)))
                finished["generate"] += 1

        async def score() -> None:
            while min(finished.values()) < 6:
                answer = await client.post("/classify", json={"input": [[5, 6, 7]]})
                assert answer.status_code == 200, answer.text
                finished["score"] += 1

        async def watch() -> None:
            nonlocal unlocked
            while True:
                was_awake = engine._engine.is_awake  # type: ignore[attr-defined]
                with (tmp_path / "device-0.turn").open() as lock, suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    unlocked += was_awake and engine._engine.is_awake  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(120):
            await asyncio.gather(generate(), generate(), score(), score())
        watching.cancel()
        assert unlocked == 0, "it is awake only while it holds the device, which the model then cannot have"
        assert not watching.done() or watching.cancelled()
        asked = asyncio.create_task(client.post("/classify", json={"input": [[5, 6, 7]]}))
        await wait_until(lambda: not engine._engine.is_awake, 60)  # type: ignore[attr-defined]
        await asyncio.gather(asked, return_exceptions=True)
        process.kill()  # it holds the turn
        await asyncio.to_thread(process.wait)
    request = GenerationRequest("last", [1], SamplingParams(max_tokens=4))
    assert (await asyncio.wait_for(engine.generate(request), 120)).token_ids
    await engine.close()


STEPS = 5
GROUPS = 2
SIZE = 3


async def test_two_workers_and_a_trainer_take_turns_and_survive_deaths_of_the_holder(tmp_path: Path) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "w3 w4", "ground_truth": "1"}\n')
    config = simulated_config(
        tmp_path, data__eval={"held": str(held_out)}, rollout__engine="transformers",
        rollout__trainer_gpus="turns", rollout__gpu_turn_s=0.1, rollout__sampling={"max_tokens": 8},
        trainer__policy="transformers", trainer__steps=STEPS, trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE, trainer__mini_batches=2, trainer__evaluation={"every": 1},
        trainer__checkpoint_every=2, streams__lease_s=2.0,
    )  # fmt: skip
    watcher = GpuLock([tmp_path / "device-0"])
    async with ServiceRun(tmp_path, config) as run:
        run.variables = {role: {LOCKS_DIR_VARIABLE: str(tmp_path)} for role in SERVICES}
        for role, name in (("rollout", "r0"), ("rollout", "r1"), ("reward", ""), ("trainer", "")):
            run.start(role, name)

        await run.reach(1)
        # Whoever dies gives the device back: a place in line is enough to see it.
        run.kill("r0")
        await watcher.acquire()
        run.kill("trainer")
        watcher.release()
        run.start("trainer")
        commits = await run.trained()
        await run.stop_all("r1", "reward")
        await watcher.acquire()  # nobody has it
    assert all(commit.metrics["staleness/max"] <= 1.0 for commit in commits)
    assert any(commit.metrics.get("time/wait_device_s", 0.0) > 0.0 for commit in commits)
    evaluated = {r["version"] for r in read_records(run.run_dir / METRICS_FILE) if r["kind"] == EVALUATION}
    assert evaluated == set(range(STEPS + 1))


@pytest.mark.parametrize("staleness", [0, 2])
async def test_an_engine_that_finishes_what_runs_takes_turns_at_any_staleness(tmp_path, staleness):
    config = simulated_config(
        tmp_path, rollout__trainer_gpus="turns", rollout__gpu_turn_s=0.05, trainer__steps=6,
        trainer__groups_per_step=2, trainer__max_staleness=staleness,
    )  # fmt: skip
    async with ServiceRun(tmp_path, config) as run:
        run.variables = {role: {LOCKS_DIR_VARIABLE: str(tmp_path)} for role in SERVICES}
        run.start_all()
        await run.trained()
        await run.stop_all("rollout")
