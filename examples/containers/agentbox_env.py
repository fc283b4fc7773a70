"""The folders of tasks/ as an environment of agentbox-rl (0.3), which is a TRL class.

python examples/containers/agentbox_env.py > train.jsonl
"""

import json
import shlex
from typing import Any

from agentbox.config import AgentConfig, ResourceLimits, SandboxConfig, SecurityConfig
from agentbox.integrations.trl import make_environment_factory, tasks_to_rows
from agentbox.sandbox.backend import DockerBackend
from agentbox.sandbox.types import ImageProfile
from agentbox.tasks.schema import EnvironmentSpec, Task, VerifierSpec
from task_folder import WORKDIR, TaskFolder, read_tasks

SERVES = "web-server"
"""The task whose solution is a program that runs on."""
USER = "1000:1000"
ENDS_ALL = "kill -9 -1 2> /dev/null || true"
"""Ends all processes of the user but itself and process 1."""
PATH = "/usr/local/bin:/usr/bin:/bin"
KILLED = 137
AGENT = AgentConfig(tools=["run_command", "submit"])
BOX = SandboxConfig(
    workspace_dir=WORKDIR,
    working_dir=WORKDIR,
    ensure_pytest=False,
    auto_pull=False,
    limits=ResourceLimits(memory_mb=512),
    # Without an init, process 1 is `sleep`: nothing in the box can end it.
    security=SecurityConfig(user=USER, init=False),
)


async def _know_image(backend: DockerBackend, image: str) -> ImageProfile:
    """What agentbox asks of an image once in each process, by a container without a session's label. A kill
    meanwhile would leave that container for good. The tests of the tasks need bash in any case."""
    return ImageProfile(image=image, image_id=image, has_bash=True)


DockerBackend.image_profile = _know_image


def to_agentbox(task: TaskFolder) -> Task:
    """agentbox runs the model's commands and the test as one user. So the test is no file, and what the
    model has left running is ended first."""
    clean = f"exec env -i PATH={PATH} HOME=/nonexistent bash -c {shlex.quote(task.test)}"
    verifier = VerifierSpec(
        command=clean,
        pre_commands=[] if task.name == SERVES else [ENDS_ALL],
        workdir="/",
    )
    return Task(
        task_id=task.name,
        description=task.instruction,
        starter_files=task.files,
        verifier=verifier,
        environment=EnvironmentSpec(image=task.image),
    )


TASKS = {task.name: task for task in read_tasks()}
Boxes = make_environment_factory(
    [to_agentbox(task) for task in TASKS.values()], sandbox=BOX, agent=AGENT, name="Boxes"
)


class Env(Boxes):
    """agentbox's class, with the label by which a lost session's box is found."""

    def reset(self, **row: Any) -> str | None:
        """Start the row's task in a new box."""
        label = row.get("tidemill_session")
        if label:
            self._sandbox = BOX.model_copy(update={"labels": {"tidemill.session": label}})
            super().__init__()  # makes its box by these settings
        return super().reset(**row)

    def get_reward(self) -> float:
        """The test's result. A box that could not be started, or is gone, has none."""
        reward = super().get_reward()
        if reward is None:
            raise RuntimeError(f"no reward: {self._infra_error or 'the test could not be run'}")
        exit_code = self.last_trajectory.verify.exit_code if self.last_trajectory else 0
        if exit_code == KILLED:
            raise RuntimeError("no reward: the test was killed, or its box is gone")
        return reward


def oracle(row: dict[str, Any]) -> list[Any]:
    """What a model that knows the solution says: for `tidemill check`."""
    return [{"run_command": {"command": TASKS[row["task_id"]].solution}}, "done"]


if __name__ == "__main__":
    for row in tasks_to_rows(
        [to_agentbox(task) for task in TASKS.values()], agent=AGENT, workspace_dir=WORKDIR
    ):
        print(json.dumps(row))
