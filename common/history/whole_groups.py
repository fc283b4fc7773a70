"""Many groups at once: every stream is read a single time, whatever the number of groups."""

from collections import defaultdict

from tidemill.common.history.groups import dropped_groups
from tidemill.common.history.history import History
from tidemill.common.history.records import GroupRecord, samples_of
from tidemill.common.streams.selection import Range, Selection, StreamName
from tidemill.common.wire.messages import Commit, Lane, Score, Ticket, Trajectory


async def read_groups(
    history: History, steps: Range | None = None, lane: Lane = Lane.TRAIN
) -> list[GroupRecord]:
    """The groups whose tickets were issued for these steps, by number. All of it is held in memory:
    token ids, texts and scores. Dead letters and replacements are left to `read_group`."""
    wanted = Selection(steps=steps)
    made: dict[int, list[Trajectory]] = defaultdict(list)
    scored: dict[int, list[Score]] = defaultdict(list)
    commits: dict[int, Commit] = {}
    issued = {m.ticket: m async for m in history.messages(StreamName.PROMPTS.of(lane), Ticket, wanted)}
    async for trajectory in history.messages(StreamName.TRAJECTORIES.of(lane), Trajectory, wanted):
        made[trajectory.ticket].append(trajectory)
    if lane is Lane.TRAIN:
        async for commit in history.messages(StreamName.COMMITS, Commit):
            commits |= dict.fromkeys(
                [*commit.groups, *(ticket for ticket, _ in dropped_groups(commit))], commit
            )
    numbers = sorted({*issued, *made})
    if numbers:
        near = Selection(tickets=(numbers[0], numbers[-1]))
        async for score in history.messages(StreamName.SCORES.of(lane), Score, near):
            scored[score.ticket].append(score)
    return [
        GroupRecord(
            number,
            lane,
            issued.get(number),
            samples_of(made[number], scored[number], commits.get(number), number),
            commits.get(number),
        )
        for number in numbers
    ]
