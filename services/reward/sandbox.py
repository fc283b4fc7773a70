"""The reward of code: what share of its tests it passes, run by the sandbox workers."""

import re

from common import metrics
from common.config.sandbox import SandboxConfig
from services.reward.outcome import Outcome
from services.reward.sample import Sample
from services.reward.sandbox_jobs import SandboxJobs

FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py")


class SandboxReward:
    """Scores completions by running their code."""

    slots: int | None = None

    def __init__(self, config: SandboxConfig, jobs: SandboxJobs) -> None:
        self._config, self._jobs = config, jobs

    async def score(self, sample: Sample) -> Outcome:
        """Run the completion's code against the tests in its ground truth."""
        code = extract_code(sample.solution_str)
        if not code.strip():
            metrics.SANDBOX_JOBS.labels("no_code").inc()
            return Outcome(0.0, {"passed": 0.0}, {"sandbox": "the completion has no code"})
        with metrics.SANDBOX_SECONDS.time():
            result = await self._jobs.run(code, sample.ground_truth, self._config)
        share = result["passed"] / result["total"]
        outcome = next((name for name in result["outcomes"] if name != "done"), "done")
        metrics.SANDBOX_JOBS.labels(outcome).inc()
        value = share if self._config.score == "fraction" else float(share == 1.0)
        detail = {"outcomes": result["outcomes"], "first_failure": result["first_failure"]}
        return Outcome(value, {"passed": share, "wall_s": result["wall_s"]}, {"sandbox": detail})

    async def close(self) -> None:
        """Stop waiting for results."""
        await self._jobs.close()


def extract_code(text: str) -> str:
    """The last block fenced as Python, else the last fenced block, else the whole text."""
    blocks = FENCE.findall(text)
    marked = [body for language, body in blocks if language.lower() in PYTHON]
    if marked:
        return str(marked[-1])
    return str(blocks[-1][1]) if blocks else text
