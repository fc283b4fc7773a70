"""What a run may cost: nothing is thrown away, made twice or left behind except because of a fault."""

from collections import Counter

from tests.simulation.redis.stream import Stream
from tests.simulation.schedule import ENVIRONMENTS, LEASE_S, REISSUE_AFTER_S, Schedule
from tests.simulation.world import World
from tidemill.common.config import RunConfig
from tidemill.common.redis.lines import ANSWER_TIMEOUT_S
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.groups.group_filter import NO_CHOICES, NO_PAYLOAD

HARMLESS = frozenset({"host_clock", "disk_full", "server_clock"})
"""Faults that end no process and lose nothing in Redis."""
POISON = frozenset({"foreign", "damage", "older", "vanish"})
"""Faults after which some entry cannot be processed, by any worker or by the one of an older release."""
LOSSES = frozenset({"restart", "failover", "empty"})
LEASES_A_RUN = 3
LEASES_A_FAULT = 2
"""Leases by which a run may take longer than without faults: in any case, and for each fault."""
OF_REWARDS = ("zero_variance", "too_few_scores", "failed_score", "replaced before a restart")
"""Why groups are replaced where nothing went wrong. The last stands for any of the others."""


def dead_letters(world: World, schedule: Schedule, commits: list[Commit]) -> list[str]:
    """Nothing is dead-lettered that is not poison, or of a history that Redis has lost: of a version, or of a
    group that was trained and trimmed, with its payloads, before Redis lost the trimming."""
    kinds = {fault.kind for fault in schedule.faults}
    if kinds & POISON:
        return []
    trained = {ticket for commit in commits for ticket in commit.groups}
    has_losses = not kinds.isdisjoint(LOSSES)
    problems = []
    for record in world.history.records:
        if record.stream == "dead" and (letter := record.message) is not None:
            may_be_old = has_losses or len(schedule.bounds) > 1
            is_old = letter.error.startswith("staleness") and may_be_old
            is_trimmed = "cannot be had" in letter.error and letter.ticket in trained and has_losses
            if not is_old and not is_trimmed:
                problems.append(f"dead: {letter.origin} {letter.entry_id}: {letter.error}")
    return problems[:1]


def dropped_without_need(schedule: Schedule, commits: list[Commit]) -> list[str]:
    """Groups are replaced for their rewards alone, and no sample lacks what it claims, unless Redis has lost
    something, strangers write, payloads are removed, or the run was resumed with a tighter bound."""
    if not {fault.kind for fault in schedule.faults}.isdisjoint(LOSSES | POISON) or len(schedule.bounds) > 1:
        return []
    problems = [
        f"dropped: ticket {ticket} at step {commit.step}: {reason}"
        for commit in commits
        for ticket, index, reason in commit.dropped
        if (index < 0 and reason not in OF_REWARDS) or reason in (NO_PAYLOAD, NO_CHOICES)
    ]
    return problems[:1]


def made_again(num_again: int, done: Counter[str], config: RunConfig, num_restarts: int) -> list[str]:
    """Because of a fault at most twice as many samples are generated again as are in flight."""
    trainer = config.trainer
    in_flight = (1 + trainer.max_staleness) * trainer.groups_per_step * (trainer.group_size + 1) + 8
    num_events = sum(count for kind, count in done.items() if kind not in HARMLESS) + num_restarts
    if num_again > 2 * num_events * in_flight:
        return [f"waste: {num_again} samples were generated again, after {num_events} faults"]
    return []


def left_behind(world: World, schedule: Schedule) -> list[str]:
    """Keys of groups whose tickets no worker holds.

    With foreign copies of tickets nothing is checked: they are worked on like any other.
    """
    kinds = {fault.kind for fault in schedule.faults}
    if "foreign" in kinds:
        return []
    values = world.cluster.server.space.values
    problems = []
    for raw in values:
        name, _, lane = world.keys.name_of(raw.decode()).partition(":")
        ticket, _, lane = lane.removesuffix(":parts").partition(":")
        if name != "group":
            continue
        stream = values.get(f"{world.keys.prompts()}{':eval' if lane else ''}".encode())
        group = stream.groups.get(ROLLOUT_GROUP.encode()) if isinstance(stream, Stream) else None
        if group is None or (int(ticket) + 1, 0) not in group.pending:
            problems.append(f"left: the progress of ticket {ticket} {lane}")
    return problems[:1]


def allowed_s(schedule: Schedule, undisturbed_s: float) -> float:
    """How long a run may take: as without faults, what these last, and some leases for each of them."""
    lasting_s = sum(float(fault.how.get("for_s", 0.0)) for fault in schedule.faults)
    hanging_s = sum(ANSWER_TIMEOUT_S for fault in schedule.faults if "hang" in fault.how)
    # Foreign entries may look like work in progress, which is given up after `REISSUE_AFTER_S`.
    waited_for = {"foreign", "empty"}
    if len(schedule.faults) > 1:
        waited_for.add("damage")  # a trainer that starts again does not know what could not be read
    waiting_s = sum(REISSUE_AFTER_S for fault in schedule.faults if fault.kind in waited_for)
    # A sample that takes longer than a lease costs more when it is made again, and which ones fail is chance.
    is_session = schedule.setup.sessions or schedule.setup.parts in ENVIRONMENTS
    sample_s = schedule.setup.sample_s * (2 if is_session else 1)
    made_again_s = max(LEASE_S, sample_s) * (LEASES_A_RUN + LEASES_A_FAULT * len(schedule.faults))
    return undisturbed_s + lasting_s + hanging_s + waiting_s + made_again_s
