"""The undisturbed training over the same streams: every version's digest must come out bit for bit."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.chaos.archive import Archive
from tests.support.training import pending_groups
from tidemill.common.config import RunConfig
from tidemill.common.process.activity import Activity
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.policy.policy import Policy, PolicyThread
from tidemill.services.trainer.step import StepRunner


@dataclass
class ReplayResult:
    """How many versions were trained again, and which came out different."""

    num_compared: int
    different: list[int]
    not_standing: list[int]
    """Steps whose records Redis has lost after they were trained: nobody can train them again."""

    @property
    def matches(self) -> bool:
        """Whether every version that can be trained again has the digest of its commit."""
        return self.num_compared > 0 and not self.different


class CheckpointCopies:
    """Hard links to the run's checkpoints, taken while it runs, to go on from behind a step that is gone."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self.source = run_dir / "checkpoints"
        self.folder = folder

    def follow(self) -> None:
        """Link what is new. A checkpoint's bytes never change under their name."""
        for path in self.source.glob("v*") if self.source.exists() else ():
            target = self.folder / path.name
            if target.exists():
                continue
            try:
                shutil.copytree(path, target, copy_function=_link)
            except (OSError, shutil.Error):  # retired meanwhile
                shutil.rmtree(target, ignore_errors=True)

    def after(self, version: int) -> tuple[int, Path] | None:
        """The first one at `version` or later."""
        folders = [(int(path.name[1:]), path) for path in sorted(self.folder.glob("v*"))]
        return next(((number, path) for number, path in folders if number >= version), None)


async def replay(
    archive: Archive,
    config: RunConfig,
    load: Callable[[RunConfig], Policy],
    checkpoints: CheckpointCopies,
) -> ReplayResult:
    """Train every commit that stands, from version 0 on, with one policy that nothing disturbs."""
    torch.set_num_threads(config.trainer.num_threads or torch.get_num_threads())
    policy = await asyncio.to_thread(load, config)
    samples = [archive.whole(sample) for sample in archive.trajectories.messages]
    thread = PolicyThread()
    groups = pending_groups(samples, archive.scores.messages)
    runner = StepRunner(config, policy, thread, Activity("replay"))
    doubtful = _doubtful_tickets(archive)
    result = ReplayResult(0, [], [])
    at = 0
    for commit in sorted(archive.commits.messages, key=lambda commit: commit.step):
        if commit.step < at:
            continue
        if commit.step > at or not _stands(commit, groups, doubtful, config.trainer.group_size):
            result.not_standing.append(commit.step)
            if (checkpoint := checkpoints.after(commit.version)) is None:
                break
            at, folder = checkpoint
            await thread.call(policy.load_state, folder)
            continue
        await runner.replay(commit, groups)
        at = commit.version
        result.num_compared += 1
        if await thread.call(policy.digest) != commit.digest:
            result.different.append(commit.version)
    return result


def _doubtful_tickets(archive: Archive) -> set[int]:
    """Groups of which Redis has lost a part: whether the old or the new one was trained, nobody can say."""
    lost = (*archive.trajectories.lost.values(), *archive.scores.lost.values())
    return {message.ticket for message in lost}


def _stands(commit: Commit, groups: dict[int, Group], doubtful: set[int], size: int) -> bool:
    return all(
        ticket not in doubtful
        and ticket in groups
        and len(groups[ticket].trajectories) == len(groups[ticket].scores) == size
        for ticket in commit.groups
    )


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)
