"""Sessions of several turns through real services: workers and environments die, and nothing is lost."""

from pathlib import Path

from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun
from tests.support.training import messages
from tests.support.waiting import wait_until
from tidemill.common.config import load_config
from tidemill.common.wire.messages import DeadLetter, Score, Trajectory

STEPS, GROUPS, SIZE = 3, 4, 4
ENVIRONMENT = '''
import os, time
from pathlib import Path
from game import Guess

class Mortal(Guess):
    """Slow, and its process dies in the middle of a game, three times in all."""

    def step(self, text):
        time.sleep(0.05)
        for life in range(3):
            mark = Path(__file__).with_name(f"died-{life}")
            if self.num_guesses and not mark.exists():
                mark.touch()
                os._exit(9)
        return super().step(text)
'''


async def test_sessions_survive_the_death_of_their_environment_and_of_their_worker(tmp_path: Path) -> None:
    guess = REPO / "examples" / "guess"
    (tmp_path / "game.py").write_text((guess / "game.py").read_text())
    (tmp_path / "mortal.py").write_text(ENVIRONMENT)
    config = load_config(
        guess / "config.yaml",
        [
            f"rollout.environment.use={tmp_path / 'mortal.py'}:Mortal",
            "rollout.environment.processes=2",
            "rollout.max_groups_in_flight=4",
            f"trainer.steps={STEPS}",
            f"trainer.groups_per_step={GROUPS}",
            f"trainer.group_size={SIZE}",
            "data.eval={}",
            "streams.lease_s=2",
        ],
    )
    async with ServiceRun(tmp_path, config) as run:
        run.start("reward")
        run.start("rollout", "first")
        run.start("trainer")
        await wait_until(lambda: _num_samples(run, 5), 90)
        run.kill("first")
        run.start("rollout", "second")
        await run.trained()
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        scores = {s.key: s.value for s in await messages(run.broker, run.keys.scores(), Score)}
        assert not await messages(run.broker, run.keys.dead, DeadLetter)
        assert await run.stop("second") == 0
    sessions = [sample.session for sample in samples if sample.session is not None]
    assert len(sessions) == len(samples)
    assert sum(len(session.turns) for session in sessions) >= 2 * len(sessions)
    assert {session.end for session in sessions} <= {"done", "max_turns"}
    failed = [sample for sample in samples if sample.session is not None and sample.session.num_faults]
    assert failed, "a session whose environment died was played again"
    for sample in samples:
        assert sample.session is not None
        assert scores.get(sample.key, sample.session.reward) == sample.session.reward
        assert sample.completion_ids[sample.mask].tolist() == [
            token
            for turn in sample.session.turns
            for token in sample.completion_ids[turn.first : turn.end].tolist()
        ]


async def _num_samples(run: ServiceRun, count: int) -> bool:
    return len(await messages(run.broker, run.keys.trajectories(), Trajectory)) >= count
