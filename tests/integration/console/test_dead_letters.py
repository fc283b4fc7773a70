"""What nobody can process goes to the dead letters with its bytes and its error, and the run goes on."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from redis.exceptions import ResponseError

from tests.support.letters import make_ticket
from tests.support.runs import ServiceRun, hold_scores, simulated_config
from tests.support.training import assert_nothing_lost, make_score, messages
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.run.state import read_state
from tidemill.common.streams import id_order, last_id
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Ticket

STEPS = 6
GROUPS = 2
SIZE = 2
GARBAGE = {"v": codec.SCHEMA, "p": b"\xc1 this is not msgpack"}
NEWER = {"v": b"2.0", "p": b"\x80"}
STRANGE = {"something": b"else"}


@cache  # some of them hold the time
def misfits(keys: Keys) -> dict[str, dict[str, bytes]]:
    """For every stream an entry that is well-formed and makes no sense: arrays of wrong lengths, mostly."""
    trajectory = make_trajectory(0, 0, group_size=SIZE)
    manifest = {"version": 0, "folder": "../../etc", "files": [], "digest": "0" * 32}
    trees: dict[str, dict[str, Any]] = {}
    for lane in Lane:
        trees[keys.prompts(lane)] = _tree(make_ticket(0)) | {"prompt_ids": b"12345"}
        trees[keys.trajectories(lane)] = _tree(trajectory) | {"logprobs": np.zeros(99, np.float32).tobytes()}
        trees[keys.scores(lane)] = _tree(make_score(0, 0)) | {"value": None}
    trees[keys.weights] = manifest
    trees[keys.commits] = {"step": 0, "version": 0}
    trees[keys.dead] = {"origin": "prompts"}
    return {key: {"v": codec.SCHEMA, "p": msgpack.packb(tree)} for key, tree in trees.items()}


def _tree(message: Any) -> dict[str, Any]:
    return dict(codec.unpack(codec.encode_payload(message)))


async def poison(run: ServiceRun) -> None:
    """Into every stream, after whatever is in it, four entries that no reader of it can read."""
    numbered = {run.keys.prompts(lane) for lane in Lane} | {run.keys.weights, run.keys.commits}
    for key, misfit in misfits(run.keys).items():
        for fields in (GARBAGE, NEWER, STRANGE, misfit):
            flat = [word for pair in fields.items() for word in pair]
            if key in numbered:
                await _append_next(run, key, flat)
            else:
                await run.broker.execute("XADD", key, "*", *flat)


async def _append_next(run: ServiceRun, key: str, flat: list[Any]) -> None:
    """Right behind the last entry: these have numbers as ids, and the clock would be beyond all of them."""
    while True:
        milliseconds, sequence = id_order(await last_id(run.broker, key))
        try:
            await run.broker.execute("XADD", key, f"{milliseconds}-{sequence + 1}", *flat)
            return
        except ResponseError as error:  # the trainer was faster
            assert "equal or smaller" in str(error)


BURIED = ("prompts", "prompts:eval", "trajectories", "trajectories:eval", "scores", "scores:eval")
"""Streams whose readers dead-letter all that they cannot read."""
MOVED = ("weights", "commits")
"""Streams that the trainer rids of foreign entries where they are in its way; the others are passed over."""


async def test_poison_and_refused_prompts_do_not_stop_the_run(tmp_path: Path) -> None:
    data = tmp_path / "some.jsonl"
    rows = [f'{{"prompt": "w{i} w{i + 1}", "ground_truth": "{i}"}}' for i in range(7)]
    data.write_text(
        "\n".join([*rows, '{"prompt": "w1 w2 w3 w4 w5 w6 w7 w8", "ground_truth": "long"}']) + "\n"
    )
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "w1", "ground_truth": "1"}\n{"prompt": "w2", "ground_truth": "2"}\n')
    config = simulated_config(
        tmp_path,
        data__train=str(data),
        trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE,
        trainer__evaluation={"every": 2},
        data__eval={"held": str(held_out)},
        rollout__sampling={"max_tokens": 8},
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.05},
        reward__timeout_s=600.0,
    )
    # Those of four steps: the run may not end before it is poisoned again.
    gate = hold_scores(tmp_path, 4 * GROUPS * SIZE)
    async with ServiceRun(tmp_path, config) as run:
        keys = run.keys
        await poison(run)
        # This worker's model takes 12 tokens: 8 to generate, and no prompt of more than 4.
        run.start("rollout", "", "model.max_model_len=12", "data.max_prompt_tokens=4")
        run.start("reward")
        run.start("trainer")
        await run.reach(2)
        await poison(run)
        run.kill("trainer")  # or what is among the commits would never be read
        gate.touch()
        run.start("trainer")
        assert await run.wait("trainer") == 0, run.log_of("trainer")

        async def num_dead() -> bool:
            letters = await messages(run.broker, keys.dead, DeadLetter)
            unread = [letter for letter in letters if letter.ticket < 0 and letter.origin in BURIED]
            return len(unread) == 2 * 4 * len(BURIED)

        await wait_until(num_dead, awaited="the poison is dead-lettered")
        for role in ("rollout", "reward"):
            assert await run.stop(role) == 0, run.log_of(role)
        letters = await messages(run.broker, keys.dead, DeadLetter)
        tickets = {ticket.ticket: ticket for ticket in await messages(run.broker, keys.prompts(), Ticket)}
        state = await read_state(run.broker, keys)
        commits = await assert_nothing_lost(run.broker, keys, len(tickets))

    assert len(commits) == STEPS
    assert {item["version"] for item in state["evaluations"]} == {0, 2, 4, 6}
    assert all(item["num_failed"] == 0 for item in state["evaluations"])
    assert {letter.origin for letter in letters} <= {*BURIED, *MOVED}
    unreadable = [letter for letter in letters if letter.ticket < 0 and letter.origin in BURIED]
    assert Counter(letter.origin for letter in unreadable) == dict.fromkeys(BURIED, 8)
    for origin in BURIED:
        misfit = misfits(keys)[keys.prompts().replace("prompts", origin)]
        fields_of_letters = [letter.fields for letter in unreadable if letter.origin == origin]
        assert all(fields_of_letters.count(kind) == 2 for kind in (GARBAGE, NEWER, STRANGE, misfit)), origin
    errors = " ".join(letter.error for letter in unreadable)
    for expected in ("schema 2.0 cannot be read", "3 completion ids but 99 logprobs", "not a whole number"):
        assert expected in errors

    refused = {ticket.ticket for ticket in tickets.values() if ticket.ground_truth == "long"}
    assert refused
    dead = [letter for letter in letters if letter.ticket >= 0]
    assert {letter.ticket for letter in dead} == refused
    assert {letter.origin for letter in dead} == {"prompts"}
    replacements = {t.replaces: t for t in tickets.values() if t.replaces >= 0}
    assert set(replacements) == refused
    assert all(replacements[number].step == tickets[number].step for number in refused)
    dropped = {ticket: reason for commit in commits for ticket, _, reason in commit.dropped}
    assert set(dropped) == refused
    assert all(reason.startswith(("dead: ", "replaced before a restart")) for reason in dropped.values())
