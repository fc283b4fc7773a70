"""What nobody can process goes to the dead letters with its bytes and its error, and the run goes on."""

from pathlib import Path

from common import codec
from common.messages import DeadLetter, Ticket
from common.streams import id_order, last_id
from tests.runs import ServiceRun, simulated_config
from tests.training import assert_nothing_lost, messages, num_commits
from tests.waiting import wait_until

STEPS, GROUPS, SIZE = 6, 2, 2
GARBAGE = ("v", codec.SCHEMA, "p", b"\xc1 this is not msgpack")
NEWER = ("v", b"2.0", "p", b"\x80")
STRANGE = ("something", "else")


async def poison(run: ServiceRun, key: str) -> None:
    """Three entries that no reader of the stream can read, after whatever is in it."""
    numbered = key == run.keys.prompts()
    for fields in (GARBAGE, NEWER, STRANGE):
        milliseconds, sequence = id_order(await last_id(run.broker, key))
        # Tickets have numbers as ids: an entry of the clock would be beyond all of them.
        entry_id = f"{milliseconds}-{sequence + 1}" if numbered else "*"
        await run.broker.execute("XADD", key, entry_id, *fields)


async def test_poison_and_refused_prompts_do_not_stop_the_run(tmp_path: Path) -> None:
    data = tmp_path / "some.jsonl"
    rows = [f'{{"prompt": "w{i} w{i + 1}", "ground_truth": "{i}"}}' for i in range(7)]
    data.write_text(
        "\n".join([*rows, '{"prompt": "w1 w2 w3 w4 w5 w6 w7 w8", "ground_truth": "long"}']) + "\n"
    )
    config = simulated_config(
        tmp_path,
        data__train=str(data),
        trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE,
        rollout__sampling={"max_tokens": 8},
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.05},
    )
    async with ServiceRun(tmp_path, config) as run:
        keys = run.keys
        streams = (keys.prompts(), keys.trajectories(), keys.scores())
        for key in streams:
            await poison(run, key)
        # This worker's model takes 12 tokens: 8 to generate, and no prompt of more than 4.
        run.start("rollout", "", "model.max_model_len=12", "data.max_prompt_tokens=4")
        run.start("reward")
        run.start("trainer")

        async def has_commits() -> bool:
            return await num_commits(run.broker, keys) >= 2

        await wait_until(has_commits, 90)
        for key in streams:
            await poison(run, key)
        assert await run.wait("trainer") == 0, run.log_of("trainer")

        async def num_buried() -> bool:
            letters = await messages(run.broker, keys.dead, DeadLetter)
            return sum(letter.ticket < 0 for letter in letters) == 12

        await wait_until(num_buried, what="the poison of prompts and trajectories is buried")
        for role in ("rollout", "reward"):
            assert await run.stop(role) == 0, run.log_of(role)
        letters = await messages(run.broker, keys.dead, DeadLetter)
        tickets = {ticket.ticket: ticket for ticket in await messages(run.broker, keys.prompts(), Ticket)}
        commits = await assert_nothing_lost(run.broker, keys, len(tickets))

    assert len(commits) == STEPS
    unreadable = [letter for letter in letters if letter.ticket < 0]
    assert sorted(letter.origin for letter in unreadable) == ["prompts"] * 6 + ["trajectories"] * 6
    assert {letter.fields["p"] for letter in unreadable if "p" in letter.fields} == {GARBAGE[3], NEWER[3]}
    assert all(letter.error for letter in unreadable)
    assert any("schema 2.0 cannot be read" in letter.error for letter in unreadable)

    refused = {ticket.ticket for ticket in tickets.values() if ticket.ground_truth == "long"}
    assert refused
    buried = [letter for letter in letters if letter.ticket >= 0]
    assert {letter.ticket for letter in buried} == refused
    assert {letter.origin for letter in buried} == {"prompts"}
    replacements = {t.replaces: t for t in tickets.values() if t.replaces >= 0}
    assert set(replacements) == refused
    assert all(replacements[number].step == tickets[number].step for number in refused)
    dropped = {ticket: reason for commit in commits for ticket, _, reason in commit.dropped}
    assert set(dropped) == refused
    assert all(reason.startswith("dead: ") for reason in dropped.values())
