"""A rollout worker that notes what its engine generates, also where it is killed: `-m tests.chaos.generated`.

One line with the name of each request for training as it begins, and one with its tokens at its end. A
request without an end was cut off; its tokens count as many as others have in the mean.
"""

import os
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.archive import Archive
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.common.wire.messages import Trajectory, TrajectoryKey
from tidemill.services.rollout.engines.engine import Engine, Generation, GenerationRequest
from tidemill.services.rollout.engines.simulated import SimulatedEngine
from tidemill.services.rollout.engines.transformers import TransformersEngine

LOG = "generated.log"


def noted(folder: Path) -> tuple[Counter[TrajectoryKey], Counter[TrajectoryKey], int]:
    """By sample: requests, and tokens of those that came to an end; and how many did."""
    asked = Counter[TrajectoryKey]()
    generated = Counter[TrajectoryKey]()
    num_ended = 0
    for line in (folder / LOG).read_text().splitlines():
        name, _, num_tokens = line.partition(" ")
        ticket, index = map(int, name.split("-")[1:3])
        if num_tokens:
            generated[ticket, index] += int(num_tokens)
            num_ended += 1
        else:
            asked[ticket, index] += 1
    return asked, generated, num_ended


def regenerated_share(folder: Path, archive: Archive) -> float:
    """Of all tokens that were generated, those that came into no trajectory."""
    asked, ended, num_ended = noted(folder)
    generated = ended.total() * asked.total() / max(1, num_ended)
    samples: list[Trajectory] = [*archive.trajectories.messages, *archive.trajectories.lost.values()]
    published = sum(int(segment.mask.sum()) for sample in samples for segment in sample.segments)
    return max(0.0, 1.0 - published / max(1.0, generated))


def _noting(kind: type[Engine]) -> None:
    generate = kind.generate
    path = Path(os.environ[RUNS_DIR_VARIABLE]) / LOG

    async def noting(engine: Any, request: GenerationRequest) -> Generation:
        if not request.request_id.startswith("train"):
            return await generate(engine, request)
        # Opened each time, to append: many processes write, and each may die at any moment.
        with path.open("a", buffering=1) as log:
            log.write(f"{request.request_id}\n")
        generation = await generate(engine, request)
        with path.open("a", buffering=1) as log:
            log.write(f"{request.request_id} {len(generation.token_ids)}\n")
        return generation

    kind.generate = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    for engine in (SimulatedEngine, TransformersEngine):
        _noting(engine)
    runpy.run_module("tidemill.services.rollout", run_name="__main__", alter_sys=True)
