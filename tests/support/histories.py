"""The streams of a small run, written into a real Redis by hand: two steps of two groups of two.

Ticket 2 is dropped for its equal rewards, ticket 4 replaces it. Sample 1.1 could not be scored. Sample 4.1
was begun by version 0 and finished by version 1. A score of ticket 2 died.
"""

from typing import Any

import numpy as np

from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.recorded_sessions import as_session
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import RunConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import (
    Commit,
    DeadLetter,
    Message,
    Score,
    ScoreStatus,
    Ticket,
    Trajectory,
    WeightManifest,
)

BEGIN = 1_790_000_000.0
"""When the run began, in seconds since 1970. All other times are given in seconds after it."""
DIGESTS = ["0" * 32, "1" * 32, "2" * 32]
STEPS = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
"""The step of each ticket."""
REWARDS = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.5, (2, 0): 0.0, (2, 1): 0.0, (3, 0): 0.25, (3, 1): 0.75}
REWARDS |= {(4, 0): -1.0, (4, 1): 1.0}


def small_config(**sections: Any) -> RunConfig:
    trainer = {"steps": 2, "groups_per_step": 2, "group_size": 2, "max_staleness": 1}
    return make_config(trainer=trainer, **sections)


def tickets() -> list[Ticket]:
    return [
        make_ticket(
            ticket,
            step=step,
            min_version=max(0, step - 1),
            prompt_ids=np.arange(4, dtype=np.int32),
            prompt_text=f"prompt of ticket {ticket}",
            row=ticket,
            replaces=2 if ticket == 4 else -1,
            issued_at=BEGIN + 10 * step + (3 if ticket == 4 else 0),
        )
        for ticket, step in STEPS.items()
    ]


def trajectories() -> list[Trajectory]:
    """What two rollout workers made of them: a second of waiting, then two or three of generation."""
    entries = []
    for ticket in tickets():
        for index in (0, 1):
            begun = ticket.issued_at + 1.0
            entries.append(
                make_trajectory(
                    ticket.ticket,
                    index,
                    text=f"completion {index} of ticket {ticket.ticket}",
                    step=ticket.step,
                    group_size=2,
                    prompt_text=ticket.prompt_text,
                    spans=((0, 0), (1, 2))
                    if (ticket.ticket, index) == (4, 1)
                    else ((ticket.min_version, 0),),
                    worker=f"rollout-{ticket.ticket % 2}",
                    started_at=begun,
                    finished_at=begun + 2.0 + index,
                )
            )
    return entries


def scores() -> list[Score]:
    """Their scores, half a second after each, of which the reward took 0.2 s."""
    return [
        Score(
            ticket=trajectory.ticket,
            index=trajectory.index,
            status=ScoreStatus.OK if trajectory.key in REWARDS else ScoreStatus.TIMEOUT,
            value=REWARDS.get(trajectory.key),
            components={"format": 1.0, "style": None} if trajectory.key in REWARDS else {},
            detail={"judge": {"words": f"the judge read {trajectory.ticket}.{trajectory.index}"}},
            error="" if trajectory.key in REWARDS else "no answer within 5 s",
            attempts=1 if trajectory.key in REWARDS else 3,
            worker="reward-0",
            latency_s=0.2,
            scored_at=trajectory.finished_at + 0.5,
        )
        for trajectory in trajectories()
    ]


def commits() -> list[Commit]:
    """Two steps of two micro-batches each."""
    batches = [(((0, 0), (0, 1)), ((1, 0),)), (((4, 0), (3, 0)), ((3, 1), (4, 1)))]
    groups = [(0, 1), (3, 4)]
    dropped: list[tuple[tuple[int, int, str], ...]] = [((1, 1, "failed_score"),), ((2, -1, "zero_variance"),)]
    advantages = [{"0": [1.0, -1.0], "1": [0.0]}, {"3": [-1.0, 1.0], "4": [-1.0, 1.0]}]
    return [
        Commit(
            step=step,
            version=step + 1,
            mini_batches=(batches[step],),
            groups=groups[step],
            dropped=dropped[step],
            advantages=advantages[step],
            metrics={
                "reward": 0.5 - step / 4, "loss": 0.125, "grad_norm": 2.0, "staleness/max": float(step),
                "step_time_s": 10.0, "time/train_s": 3.0, "time/wait_groups_s": 6.0, "time/weights_s": 1.0,
            },
            digest=DIGESTS[step + 1],
            started_at=BEGIN + 10 * step,
            finished_at=BEGIN + 10 * step + 9.5,
        )
        for step in (0, 1)
    ]  # fmt: skip


def manifests() -> list[WeightManifest]:
    """The versions, each announced right after its commit."""
    return [
        WeightManifest(
            version=version,
            folder=f"v{version:08}",
            files=(),
            digest=DIGESTS[version],
            announced_at=BEGIN - 0.2 + 10 * version,
        )
        for version in (0, 1, 2)
    ]


def letters(error: str = "it could not be read") -> list[DeadLetter]:
    """A score that could not be decoded."""
    return [
        DeadLetter(
            origin="scores", entry_id="5-0", error=error, attempts=0, ticket=2, index=1, worker="trainer",
            died_at=BEGIN + 15,
        )
    ]  # fmt: skip


async def write_small_run(broker: Broker, keys: Keys, *others: Message, has_sessions: bool = False) -> None:
    """The whole run, every sample a session if so wanted, and further trajectories or scores after it."""
    samples = [as_session(trajectory) for trajectory in trajectories()] if has_sessions else trajectories()
    await publish_config(broker, keys, small_config())
    await append_numbered(broker, keys.prompts(), ((item.ticket, item) for item in tickets()))
    more = [item for item in others if isinstance(item, Trajectory)]
    await append(broker, keys.trajectories(), *samples, *more)
    await append(broker, keys.scores(), *scores(), *(item for item in others if isinstance(item, Score)))
    await append_numbered(broker, keys.commits, ((item.step, item) for item in commits()))
    await append_numbered(broker, keys.weights, ((item.version, item) for item in manifests()))
    await append(broker, keys.dead, *letters(), *(item for item in others if isinstance(item, DeadLetter)))
