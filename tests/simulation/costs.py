"""What a run may cost: nothing is thrown away, made twice or left behind but for a fault that happened."""

from collections import Counter

from tests.simulation.redis.stream import Stream
from tests.simulation.schedule import Schedule
from tests.simulation.world import World
from tidemill.common.config import RunConfig
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.common.wire.messages import Commit

HARMLESS = frozenset({"host_clock", "disk_full", "server_clock"})
"""Faults that take no process and nothing of Redis away."""
LOSSES = frozenset({"restart", "failover", "empty"})
OF_REWARDS = ("zero_variance", "too_few_scores", "failed_score")
"""Why groups are replaced where nothing went wrong."""


def dead_letters(world: World, schedule: Schedule) -> list[str]:
    """Nothing is dead-lettered that is not poison."""
    if any(fault.kind == "foreign" for fault in schedule.faults):
        return []
    letters = [record.message for record in world.history.records if record.stream == "dead"]
    return [f"dead: {one.origin} {one.entry_id}: {one.error}" for one in letters if one is not None][:1]


def dropped_without_need(schedule: Schedule, commits: list[Commit]) -> list[str]:
    """Groups are replaced for their rewards alone, unless Redis has lost something or strangers write."""
    if not {fault.kind for fault in schedule.faults}.isdisjoint(LOSSES | {"foreign"}):
        return []
    found = [
        f"dropped: ticket {ticket} at step {commit.step}: {reason}"
        for commit in commits
        for ticket, index, reason in commit.dropped
        if index < 0 and reason not in OF_REWARDS
    ]
    return found[:1]


def made_again(num_again: int, done: Counter[str], config: RunConfig, num_restarts: int) -> list[str]:
    """Each fault has at most what is in flight generated again, before it and after it."""
    trainer = config.trainer
    in_flight = (1 + trainer.max_staleness) * trainer.groups_per_step * (trainer.group_size + 1) + 8
    num_events = sum(count for kind, count in done.items() if kind not in HARMLESS) + num_restarts
    if num_again > 2 * num_events * in_flight:
        return [f"waste: {num_again} samples were generated again, after {num_events} faults"]
    return []


def left_behind(world: World) -> list[str]:
    """Keys of groups that nobody works on."""
    values, found = world.cluster.server.space.values, []
    for raw in values:
        name, _, lane = world.keys.name_of(raw.decode()).partition(":")
        ticket, _, lane = lane.partition(":")
        if name != "group":
            continue
        stream = values.get(f"{world.keys.prompts()}{':eval' if lane else ''}".encode())
        group = stream.groups.get(ROLLOUT_GROUP.encode()) if isinstance(stream, Stream) else None
        if group is None or (int(ticket) + 1, 0) not in group.pending:
            found.append(f"left: the progress of ticket {ticket} {lane}")
    return found[:1]
