"""Sessions of several turns through real services: workers and environments die, and nothing is lost."""

import asyncio
import json
from collections import Counter

import psutil
import pytest

from tests.chaos.archive import Archive
from tests.chaos.generated import noted
from tests.chaos.replay import CheckpointCopies, replay
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import commits_of, messages
from tests.support.waiting import wait_until
from tidemill.common.config import load_config
from tidemill.common.wire.messages import Commit, DeadLetter, Score, Trajectory
from tidemill.services.rollout.sessions.parts import read_play
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

GROUPS = 4
SIZE = 4
TOKENS = 4
KILL_EVERY_S = 5.0
KEPT_ENVIRONMENT = """
import asyncio, json, random
from pathlib import Path

class Counting:
    resumable = True

    async def reset(self, row):
        self.state = {"id": random.getrandbits(48), "turns": 0}

    async def step(self, text):
        await asyncio.sleep(0.1)
        self.state["turns"] += 1
        with Path(__file__).with_name("turns").open("a") as file:
            file.write(json.dumps(self.state) + chr(10))
        return f"w{self.state['turns']}", 0.5, self.state["turns"] == TURNS

    def get_metrics(self):
        return {"id": self.state["id"]}

    def mark(self):
        return self.state

    def restore(self, mark):
        self.state = mark
"""


@pytest.mark.parametrize(
    ("num_groups", "turns", "turn_s", "kills"),
    [(4, 10, 0.05, 1), pytest.param(16, 20, 1.0, 6, marks=(pytest.mark.long, pytest.mark.timeout(600)))],
    ids=["once", "every 5 s"],
)
async def test_a_worker_that_is_killed_in_the_middle_of_sessions_costs_a_turn_of_each(
    tmp_path, num_groups, turns, turn_s, kills
):
    (tmp_path / "counting.py").write_text(KEPT_ENVIRONMENT.replace("TURNS", str(turns)))
    config = simulated_config(
        tmp_path,
        rollout__environment={"use": f"{tmp_path / 'counting.py'}:Counting", "max_turns": turns},
        rollout__simulated={"tokens": TOKENS, "vocab_size": 32, "group_s": turn_s},
        model__max_model_len=256,
        trainer__steps=1,
        trainer__groups_per_step=num_groups,
    )
    kept = []
    async with ServiceRun(tmp_path, config) as run:
        for name in ("reward", "trainer"):
            run.start(name)
        run.start("tests.chaos.generated", "worker-0")
        progress = [run.keys.progress(ticket) for ticket in range(num_groups)]
        parts = [run.keys.parts(key) for key in progress]

        async def are_begun(num_parts: int = SIZE * 3) -> bool:
            return all([await run.broker.execute("HLEN", key) >= num_parts for key in parts])

        async def is_each_begun() -> bool:
            """Whether something is kept of every sample: on a busy machine some are far ahead of others."""
            hashes = [await run.broker.execute("HKEYS", key) for key in parts]
            return all(b"%d:0" % index in fields for fields in hashes for index in range(SIZE))

        await wait_until(are_begun)
        await wait_until(is_each_begun)
        for number in range(kills):
            run.kill(f"worker-{number}")
            kept.append([await run.broker.execute("HGETALL", key) for key in parts])
            run.start("tests.chaos.generated", f"worker-{number + 1}")
            if number + 1 < kills:
                await asyncio.sleep(KILL_EVERY_S)
                # On a slow machine the next one has only started by then.
                num_parts = max(len(raw) // 2 for raw in kept[-1]) + SIZE
                await wait_until(lambda num_parts=num_parts: are_begun(num_parts))
        await run.trained()
        archive = Archive(run.broker, run.keys)
        await archive.catch_up()
        assert await run.broker.execute("EXISTS", *progress, *parts) == 0
        assert await run.stop(f"worker-{kills}") == 0
    again = await replay(archive, config, SimulatedPolicy, CheckpointCopies(run.run_dir, tmp_path / "none"))
    assert again.matches and again.num_compared == 1
    steps = Counter(json.loads(line)["id"] for line in (tmp_path / "turns").read_text().splitlines())
    asked, generated, _ = noted(tmp_path)
    samples = {sample.key: sample for sample in archive.trajectories.messages}
    tickets = {ticket.ticket: ticket for ticket in archive.tickets.messages}
    ids = []
    for key, sample in samples.items():
        assert sample.session is not None and len(sample.session.turns) == turns
        assert sample.session.reward == turns / 2, "rewards of turns that others have played count"
        assert sample.worker == f"worker-{kills}", "no kill came too late for it"
        ids.append(int(sample.session.metrics["id"]))
        trained = sample.completion_ids[sample.mask].tolist()
        for hashes in kept:
            raw = hashes[sample.ticket]
            fields = dict(zip(raw[::2], raw[1::2], strict=True))
            play = read_play(fields, sample.index, tickets[sample.ticket].prompt_ids, pytest.fail)
            recorded = [token for piece in play.parts for token in piece.token_ids.tolist()]
            assert recorded and trained[: len(recorded)] == recorded
        assert asked[key] <= turns + kills
        assert generated[key] <= len(trained) + kills * TOKENS
        assert steps[ids[-1]] <= turns + kills
    assert len(set(ids)) == len(ids) == num_groups * SIZE


SLEEPY = '''
import time
from game import Guess

class Sleepy(Guess):
    """For some guesses of the model it never answers."""

    def step(self, text):
        if text.strip() in ("1", "2", "3"):
            time.sleep(3600)
        return super().step(text)
'''


async def test_an_environment_that_sleeps_for_ever_costs_one_limit_of_time_and_its_groups_train(tmp_path):
    guess = REPO / "examples" / "guess"
    (tmp_path / "game.py").write_text((guess / "game.py").read_text())
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    config = load_config(
        guess / "config.yaml",
        [
            f"rollout.environment.use={tmp_path / 'sleepy.py'}:Sleepy",
            "rollout.environment.processes=4",
            "rollout.environment.call_timeout_s=3",
            "reward.on_failure=-1.0",
            "trainer.steps=1",
            f"trainer.groups_per_step={GROUPS}",
            f"trainer.group_size={SIZE}",
            "data.eval={}",
        ],
    )
    async with ServiceRun(tmp_path, config) as run:
        for role in ("reward", "rollout", "trainer"):
            run.start(role)
        await run.trained()
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        scores = {s.key: s for s in await messages(run.broker, run.keys.scores(), Score)}
        (commit,) = await messages(run.broker, run.keys.commits, Commit)
        assert not await messages(run.broker, run.keys.dead, DeadLetter)
    late = [sample for sample in samples if sample.session is not None and sample.session.late == "call"]
    assert late, "the model has made one of these guesses"
    for sample in late:
        assert sample.session is not None and sample.session.end == "timeout"
        assert sample.session.num_faults == 0 and len(sample.session.turns) >= 1
        if len(sample.session.turns) == 1:
            assert scores[sample.key].value == -1.0, "what the config gives"
    assert {sample.ticket for sample in late} & {*commit.groups}


@pytest.mark.timeout(600)
async def test_a_run_trains_on_all_segments_of_an_agents_sessions_and_leaves_no_process(tmp_path):
    config = load_config(
        REPO / "examples/arith/config.yaml",
        [
            "trainer.steps=2",
            "trainer.groups_per_step=2",
            "trainer.group_size=4",
            "trainer.mini_batches=1",
            "trainer.loggers=[]",
            "trainer.evaluation={every: 0, max_prompts: 8}",
            "streams.lease_s=5",
            "rollout.environment={use: agent, agent: 'tests.support.agents:forking'}",
            "reward={rewards: {own: {environment: true}}}",
        ],
    )
    async with ServiceRun(tmp_path, config, "agents") as run:
        killed = run.start("rollout", "first")
        run.start("reward")
        run.start("trainer")
        started = psutil.Process(killed.pid)
        await wait_until(lambda: started.children(recursive=True), 120)
        children = started.children(recursive=True)
        killed.kill()
        run.start("rollout", "second")
        assert await run.wait("trainer", 240) == 0, run.log_of("trainer")
        await wait_until(lambda: not any(process.is_running() for process in children))
        commits = await commits_of(run.broker, run.keys)
    assert [len(set(commit.trained_keys)) for commit in commits] == [8, 8]
