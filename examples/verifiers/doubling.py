"""A small environment of verifiers: numbers to double, with a tool that does it."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Doubling"]


class Doubler(vf.Toolset[vf.ToolsetConfig]):
    """What the model may call."""

    @vf.tool
    def double(self, number: int) -> str:
        """Double a number."""
        return str(2 * number)


class Number(vf.TaskData):
    """One row."""

    answer: str = ""


class DoublingConfig(vf.TaskConfig):
    """Settings of the tool's server."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class DoublingTask(vf.Task[Number, vf.State, DoublingConfig]):
    """Its tool and its reward."""

    @classmethod
    def toolsets(cls, config: DoublingConfig) -> list[vf.Toolset]:
        """One server for each rollout."""
        return [Doubler(config.tools)]

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Whether the last thing said is the answer."""
        return float(trace.last_reply.strip() == self.data.answer)


class DoublingTasks(vf.TasksetConfig):
    """Settings of the taskset."""

    task: DoublingConfig = DoublingConfig()


class Doubling(vf.Taskset[DoublingTask, DoublingTasks]):
    """The rows."""

    def load(self) -> Iterator[DoublingTask]:
        """From 1 to 20."""
        for number in range(1, 21):
            data = Number(prompt=f"Double {number}.", answer=str(2 * number))
            yield DoublingTask(data, self.config.task)


if __name__ == "__main__":  # verifiers runs this file as the tool's server
    Doubler.run()
