"""Runs to look at, written as the services write them, with texts that attack the pages that show them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.recorded_sessions import as_session
from tests.support.trajectories import make_config, make_trajectory
from tests.support.vision import image_of
from tidemill.common.config import RunConfig
from tidemill.common.images.store import ImageStore
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config, update_state
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, DeadLetter, Lane, Score, ScoreStatus, Ticket, Trajectory

SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
RIGHT_TO_LEFT = "\u202egpj.exe\u202c \u05e9\u05dc\u05d5\u05dd"
CONTROLS = "\x00\x1b[31mred\x07\x7f\x85"
LONG = "a very long completion " * 4348
"""100,004 characters."""
HOSTILE = (SCRIPT, RIGHT_TO_LEFT, CONTROLS, LONG)
GROUP_SIZE = 4
NUM_GROUPS = 6


def write_folder(runs: Path, keys: Keys, model: Path | None = None) -> RunConfig:
    """The folder of a run whose config is a test's."""
    config = make_config(model={"path": str(model or runs / "no-model")})
    config = config.model_copy(update={"run_id": keys.run_id})
    folder = runs / keys.run_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config


async def write_run(broker: Broker, keys: Keys, config: RunConfig, texts: Sequence[str] = HOSTILE) -> None:
    """Groups of four, two to a step, all but the last two trained; one score failed, one message is dead."""
    await publish_config(broker, keys, config)
    await update_state(broker, keys, status="running", version=(NUM_GROUPS - 2) // 2, warnings=[])
    tickets = range(NUM_GROUPS)
    await append_numbered(broker, keys.prompts(), [(t, question(t)) for t in tickets])
    for ticket in tickets:
        samples = [completion(ticket, index, texts[index % len(texts)]) for index in range(GROUP_SIZE)]
        await append(broker, keys.trajectories(), *samples)
        await append(broker, keys.scores(), *(score_of(ticket, index) for index in range(GROUP_SIZE)))
    steps = range((NUM_GROUPS - 2) // 2)
    await append_numbered(broker, keys.commits, [(step, commit_of(step)) for step in steps])
    letter = DeadLetter(
        origin="trajectories", entry_id="1-1", fields={"v": b"1.0", "p": b"\xff"}, error=SCRIPT, ticket=1
    )
    await append(broker, keys.dead, letter)
    await append_numbered(broker, keys.prompts(Lane.EVAL), [(0, question(0))])
    await append(broker, keys.trajectories(Lane.EVAL), completion(0, 0, "an answer of the evaluation"))


def session(ticket: int, index: int) -> Trajectory:
    """A session of three turns, the last in a fork, in which everything that was said attacks."""
    sample = as_session(completion(ticket, index, SCRIPT))
    assert sample.session is not None
    attacks = []
    for message in sample.session.messages:
        attacks.append({name: _hostile(value) for name, value in message.items()})
    return as_session(sample, messages=tuple(attacks), environment=SCRIPT)


def _hostile(value: object) -> object:
    """The same value with an attack in each of its texts, but for roles."""
    if isinstance(value, dict):
        return {name: _hostile(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_hostile(item) for item in value]
    return value if value in ("assistant", "tool", "user") else f"{value} {SCRIPT} {RIGHT_TO_LEFT}"


def question(ticket: int) -> Ticket:
    """A ticket whose prompt tells its number."""
    return make_ticket(
        ticket,
        step=ticket // 2,
        group_size=GROUP_SIZE,
        prompt_text=f"question {ticket} {SCRIPT}",
        ground_truth=f"answer {ticket}",
        row=ticket,
        issued_at=1_700_000_000.0 + ticket,
    )


def seeing_question(ticket: int, store: ImageStore, *pngs: bytes) -> Ticket:
    """A ticket with pictures, of two tokens each, which are put into the store."""
    images = []
    for number, png in enumerate(pngs):
        store.put(png)
        images.append(image_of(png, 1 + 3 * number, 2))
    parts = [{"type": "image"}] * len(pngs) + [{"type": "text", "text": f"how many? {SCRIPT}"}]
    return make_ticket(
        ticket,
        step=ticket // 2,
        group_size=GROUP_SIZE,
        prompt_ids=np.arange(3 * len(pngs) + 2, dtype=np.int32),
        prompt_text=f"seen {ticket} {SCRIPT}",
        images=tuple(images),
        extra={"prompt": [{"role": "user", "content": parts}]},
        issued_at=1_700_000_000.0 + ticket,
    )


def completion(ticket: int, index: int, text: str) -> Trajectory:
    """A completion of six tokens, of which another version made the last two."""
    return make_trajectory(
        ticket,
        index,
        text,
        step=ticket // 2,
        group_size=GROUP_SIZE,
        prompt_text=f"question {ticket} {SCRIPT}",
        ground_truth=f"answer {ticket}",
        completion_ids=np.array([5, 6, 7, 8, 9, 10], dtype=np.int32),
        logprobs=np.array([-0.01, -0.5, -1.2, -2.5, -4.0, -6.0], dtype=np.float32),
        loss_mask=np.array([True, True, True, True, True, False]),
        spans=((0, 0), (1, 4)),
        worker=f"rollout-{ticket % 2}",
        started_at=1_700_000_010.0 + ticket,
        finished_at=1_700_000_012.0 + ticket,
    )


def score_of(ticket: int, index: int) -> Score:
    """Rewards grow with ticket and index; that of 1.3 failed."""
    if (ticket, index) == (1, 3):
        return Score(ticket=ticket, index=index, status=ScoreStatus.FAILED, error=f"judge said {SCRIPT}")
    return Score(
        ticket=ticket,
        index=index,
        status=ScoreStatus.OK,
        value=ticket + index / 10,
        components={"format": 0.5, SCRIPT: None},
        detail={"judge": f"words of the judge {SCRIPT}", SCRIPT: [1, {"deep": RIGHT_TO_LEFT}]},
        worker="reward-0",
        latency_s=0.25,
    )


def commit_of(step: int) -> Commit:
    """Step s trains tickets 2s and 2s + 1 in two micro-batches; 1.3 is left out."""
    tickets = (2 * step, 2 * step + 1)
    keys = []
    for ticket in tickets:
        keys.append([(ticket, index) for index in range(GROUP_SIZE) if (ticket, index) != (1, 3)])
    return Commit(
        step=step,
        version=step + 1,
        mini_batches=(tuple(map(tuple, keys)),),
        groups=tickets,
        dropped=((1, 3, "failed score"),) if step == 0 else (),
        advantages={str(t): [0.75, -0.25, -0.5, 0.5][: len(k)] for t, k in zip(tickets, keys, strict=True)},
        metrics={"reward": 0.5 + step, "loss": -0.01, "step_time_s": 2.0, "time/train_s": 1.5, "kl": 0.0},
        digest="0123456789abcdef" * 2,
        started_at=1_700_000_020.0,
        finished_at=1_700_000_022.0,
    )
