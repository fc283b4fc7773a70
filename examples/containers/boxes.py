"""The folders of tasks/ as a taskset of verifiers, each in a container of its own.

The model's commands run as `agent`; the test runs as root, from a folder that `agent` cannot enter, and is
written there when the model has ended.
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from task_folder import TEST, USER, WORKDIR, read_tasks

__all__ = ["Boxes"]

TEST_TIMEOUT_S = "60"


class Box(vf.TaskData):
    """One folder."""

    files: dict[str, str]
    solution: str
    test: str


class BoxTask(vf.Task[Box, vf.State, vf.TaskConfig]):
    """Its box, and its reward."""

    NEEDS_CONTAINER = True

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Write the files that the box has at first."""
        for name, content in self.data.files.items():
            await runtime.write(f"{WORKDIR}/{name}", content.encode())
        await self.run(runtime, "chown", "-R", f"{USER}:{USER}", WORKDIR)

    async def run(self, runtime: vf.Runtime, *command: str) -> None:
        """Run a command of ours; one that fails is an error."""
        done = await runtime.run([*command], {})
        if done.exit_code:
            raise RuntimeError(f"{command[0]} ended with exit code {done.exit_code}: {done.stderr[-300:]}")

    @vf.reward
    async def passes(self, runtime: vf.Runtime) -> float:
        """Whether the test passes."""
        await runtime.write(TEST, self.data.test.encode())
        clean = ("env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root")
        done = await runtime.run([*clean, "timeout", TEST_TIMEOUT_S, "bash", TEST], {})
        # The exit code of a box that is gone, such as 137, is not the test's.
        if done.exit_code and not await runtime.alive():
            raise RuntimeError("the box was lost while the test ran")
        return float(done.exit_code == 0)

    async def validate(self, runtime: vf.Runtime) -> bool:
        """Whether the test passes after the solution: for vf-validate."""
        solver = runtime.with_user(USER, home=f"/home/{USER}")
        await solver.run(["bash", "-c", self.data.solution], {})
        return await self.passes(runtime) == 1.0


class Boxes(vf.Taskset[BoxTask, vf.TasksetConfig]):
    """All folders."""

    def load(self) -> Iterator[BoxTask]:
        """By name."""
        for task in read_tasks():
            data = Box(
                name=task.name,
                prompt=task.instruction,
                image=task.image,
                workdir=WORKDIR,
                agent_user=USER,
                files=task.files,
                solution=task.solution,
                test=task.test,
            )
            yield BoxTask(data, self.config.task)
