"""A rollout worker that notes what its engine generates, also where it is killed: `-m tests.chaos.generated`.

One line at the begin of each request for training, and one with its tokens at its end. A request without an
end was cut off; its tokens count as many as others have in the mean.
"""

import os
import runpy
from pathlib import Path
from typing import Any

from tests.chaos.archive import Archive
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.common.wire.messages import Trajectory
from tidemill.services.rollout.engines.engine import Engine, Generation, GenerationRequest
from tidemill.services.rollout.engines.simulated import SimulatedEngine
from tidemill.services.rollout.engines.transformers import TransformersEngine

LOG = "generated.log"


def regenerated_share(folder: Path, archive: Archive) -> float:
    """Of all tokens that were generated, those that came into no trajectory."""
    lines = (folder / LOG).read_text().splitlines()
    ended = [int(line) for line in lines if line != "begins"]
    mean = sum(ended) / max(1, len(ended))
    generated = sum(ended) + mean * (lines.count("begins") - len(ended))
    samples: list[Trajectory] = [*archive.trajectories.messages, *archive.trajectories.lost.values()]
    published = sum(int(segment.mask.sum()) for sample in samples for segment in sample.segments)
    return max(0.0, 1.0 - published / max(1.0, generated))


def _noting(kind: type[Engine]) -> None:
    generate, path = kind.generate, Path(os.environ[RUNS_DIR_VARIABLE]) / LOG

    async def noting(engine: Any, request: GenerationRequest) -> Generation:
        if not request.request_id.startswith("train"):
            return await generate(engine, request)
        # Opened each time, to append: many processes write, and each may die at any moment.
        with path.open("a", buffering=1) as log:
            log.write("begins\n")
        generation = await generate(engine, request)
        with path.open("a", buffering=1) as log:
            log.write(f"{len(generation.token_ids)}\n")
        return generation

    kind.generate = noting  # type: ignore[method-assign]


if __name__ == "__main__":
    for found in (SimulatedEngine, TransformersEngine):
        _noting(found)
    runpy.run_module("tidemill.services.rollout", run_name="__main__", alter_sys=True)
