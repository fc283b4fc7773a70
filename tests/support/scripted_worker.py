"""A rollout worker whose model says what each program wants to hear: `-m tests.support.scripted_worker`.

Of the sessions, tickets number the programs of `NAMES`. The second turn of each waits until the file `GO` is
in the folder of runs; `ASKED` there has a line for each turn that was asked for: worker, ticket, turn.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.frameworks import line_of
from tests.support.scripted_model import CHAT, END
from tests.support.waiting import wait_until
from tidemill.common.config.run import RunConfig
from tidemill.common.process.service import run_service
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.services.rollout import service
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.engines.simulated import SimulatedEngine
from tidemill.services.rollout.environments.agent import AgentPlayer

NAMES = "SCRIPTED_NAMES"
ASKED = "asked"
GO = "go"
LONGEST_S = 600.0


class ScriptedEngine(SimulatedEngine):
    def __init__(self, config: RunConfig, worker: str = "") -> None:
        super().__init__(config, worker)
        self._worker = worker
        self._names = json.loads(os.environ[NAMES])
        self._folder = Path(os.environ[RUNS_DIR_VARIABLE])

    async def generate(self, request: GenerationRequest) -> Generation:
        _, has_number, number = request.request_id.rpartition("-t")
        turn = int(number) if has_number else 1
        with (self._folder / ASKED).open("a", buffering=1) as log:
            log.write(f"{self._worker} {request.ticket} {turn}\n")
        if turn > 1:
            await wait_until((self._folder / GO).exists, LONGEST_S)
        line = line_of(self._names[request.ticket])
        said = [*line.encode(), END][: request.sampling.max_tokens]
        return Generation(said, [-0.5] * len(said), ((0, 0),), "stop" if said[-1] == END else "length")


def build_player(config: RunConfig, decode: Any, read: Any, run_dir: Any = None) -> AgentPlayer:
    return AgentPlayer(config, CHAT.decode, lambda: CHAT)


if __name__ == "__main__":
    vars(service).update(build_engine=ScriptedEngine, build_player=build_player)
    sys.exit(run_service("rollout", "Generate what programs want to hear."))
