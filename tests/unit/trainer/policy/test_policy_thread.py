"""The policy's thread in turns: it has the device in every call, keeps it for a step, then leaves it."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.support.waiting import wait_until
from tidemill.common.process.activity import Activity
from tidemill.common.process.gpu_sharing import GpuLock, GpuSharingError
from tidemill.services.trainer.policy import policy as policy_module
from tidemill.services.trainer.policy.policy import PolicyThread


class Policy:
    """Knows where it is, and fails to come so often."""

    def __init__(self, failures: int = 0) -> None:
        self.is_here, self.failures = True, failures

    def enter(self) -> None:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("full. For now")
        self.is_here = True

    def leave(self) -> None:
        self.is_here = False


async def test_the_device_is_held_from_the_first_call_of_a_step_until_it_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "ENTER_AGAIN_S", 0.01)
    thread, policy, files = PolicyThread(), Policy(failures=2), [tmp_path / "device-0"]
    assert await thread.call(lambda: 1) == 1 and not thread.takes_turns
    other, activity = GpuLock(files), Activity("trainer")
    async with asyncio.timeout(60), thread.taking_turns(GpuLock(files), activity):
        thread.policy = await thread.call(lambda: policy)  # type: ignore[assignment]
        await other.acquire()
        assert not policy.is_here, "who waits gets it as soon as nothing is computed"
        thread.hold()
        called = asyncio.create_task(thread.call(lambda: policy.is_here))
        await wait_until(lambda: activity.state == "wait:device")
        assert await thread.call_anywhere(lambda: policy.is_here) is False, "a state can be saved meanwhile"
        other.release()
        assert await called and policy.failures == 0
        wanting = asyncio.create_task(other.acquire())
        await asyncio.sleep(0.1)
        assert not wanting.done() and await thread.call(lambda: policy.is_here)
        thread.release()
        await wanting
        assert not policy.is_here
        other.release()


async def test_who_cannot_enter_says_so_and_gives_the_device_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "ENTER_ATTEMPTS", 1)
    thread, files = PolicyThread(), [tmp_path / "device-0"]
    thread.policy = Policy(failures=1)  # type: ignore[assignment]
    async with asyncio.timeout(60), thread.taking_turns(GpuLock(files), Activity("trainer")):
        with pytest.raises(GpuSharingError, match="full"):
            await thread.call(lambda: None)
        await GpuLock(files).acquire()
