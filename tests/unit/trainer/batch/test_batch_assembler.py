"""Which groups a step takes, and when replacing them ends the run.

Examples worked by hand, and the promise that nothing ever grows too old."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from tests.support.training import trainer_config
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.batch.batch_assembler import LEAST_GIVE_UP, ReplacementLimit, select_groups
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import STALE, ZERO_VARIANCE

IN_ORDER: dict[str, Any] = {"batch_order": "in_order"}


def groups_of(*versions: tuple[int, int, int]) -> dict[int, Group]:
    """From (ticket, step, oldest version)."""
    return {
        ticket: Group(ticket, step, group_size=2, started_version=version)
        for ticket, step, version in versions
    }


def select(groups: dict[int, Group], complete: list[int], **fields: Any) -> list[int]:
    values: dict[str, Any] = {"batch_order": "as_ready", "groups_per_step": 2, "max_staleness": 1} | fields
    step = values.pop("step", 5)
    places = values.pop("places", 2)
    return select_groups(groups, complete, TrainerConfig.model_construct(**values), step, places)


DUE_AND_LATER = ((10, 5, 4), (11, 5, 5), (12, 6, 5), (13, 6, 5))
"""10 was started at version 4: with k = 1 it must be trained by step 5."""


PRESSED = ((10, 5, 4), (11, 5, 4), (12, 5, 4), (13, 5, 4), (14, 7, 5), (15, 7, 5))
"""With k = 2, four are due by step 6, up to which there are four places; 14 and 15 are due by step 7."""


@pytest.mark.parametrize(
    ("groups", "complete", "fields", "expected"),
    [
        # In order: only the step's own groups, in the order in which they completed.
        (((10, 5, 4), (11, 5, 4), (12, 6, 5), (13, 6, 5)), [13, 11, 12, 10], IN_ORDER, [11, 10]),
        (((10, 5, 4), (11, 5, 4), (12, 6, 5), (13, 6, 5)), [13, 12], IN_ORDER, []),
        (((10, 5, 4), (11, 5, 4)), [11, 10], IN_ORDER | {"places": 1}, [11]),
        # A replacement belongs to the step it was issued for.
        (((10, 5, 4), (27, 5, 4), (12, 6, 5)), [12, 27], IN_ORDER, [27]),
        # Without pressure the oldest complete ones: all started at version 5, so they may wait until step 6.
        # 4 are due by step 6, where 2 + 2 places are: that is tight, but every group is due by then.
        (((10, 5, 5), (11, 5, 5), (12, 6, 5), (13, 6, 5)), [13, 12, 11], {}, [11, 12]),
        # A slow group that is due now keeps its place. First place: one due (10), two free, so 11 may go.
        # Second place: one due, one free: wait for 10.
        (DUE_AND_LATER, [11, 12, 13], {}, [11]),
        (DUE_AND_LATER, [10, 11, 12, 13], {}, [10, 11]),
        # When all places are due, only due groups are taken.
        (((10, 5, 4), (11, 5, 4), (12, 6, 5)), [12], {}, []),
        (((10, 5, 4), (11, 5, 4), (12, 6, 5)), [12, 11], {}, [11]),
        # Pressure of a later step counts now. With one of the four less, one later group may pass, not two.
        (PRESSED, [14, 15], {"max_staleness": 2}, []),
        (PRESSED, [13, 14, 15], {"max_staleness": 2}, [13]),
        (PRESSED[1:], [14, 15], {"max_staleness": 2}, [14]),
        # On policy: exactly the step's own groups.
        (((10, 5, 5), (11, 5, 5)), [11], {"max_staleness": 0}, [11]),
        (((10, 5, 5), (11, 5, 5)), [], {"max_staleness": 0}, []),
    ],
)
def test_examples_by_hand(groups, complete, fields, expected):
    assert select(groups_of(*groups), complete, **fields) == expected


def test_a_group_that_has_not_started_counts_as_old_as_it_may_become():
    # Nothing is known of 10 but its min_version: s - k = 4.
    groups = groups_of((11, 5, 5), (12, 6, 5))
    groups[10] = Group(10, step=5, ticket_min_version=4, group_size=2)
    assert select(groups, [11, 12]) == [11]
    groups[10].started_version = 5
    assert select(groups, [11, 12]) == [11, 12]


def test_groups_that_the_step_has_taken_are_not_counted_again():
    groups = groups_of((10, 5, 4), (11, 5, 5), (12, 6, 5))
    groups[10].is_taken = True
    assert select(groups, [11, 12], places=1) == [11]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_group_is_ever_dropped_or_trained_too_late_however_slow_it_is(max_staleness):
    rng = random.Random(max_staleness)
    for _ in range(30):
        trained = _simulate(rng, max_staleness, num_steps=12, groups_per_step=3)
        assert sorted(ticket for ticket, _, _ in trained) == list(range(36))
        assert max(step - version for _, step, version in trained) <= max_staleness


def _simulate(
    rng: random.Random, max_staleness: int, num_steps: int, groups_per_step: int
) -> list[tuple[int, int, int]]:
    """A run where groups start and finish at random; returns (ticket, step trained, version) of each."""
    groups: dict[int, Group] = {}
    complete: list[int] = []
    trained: list[tuple[int, int, int]] = []
    issued = 0
    for step in range(num_steps):
        limit = min(step + 1 + max_staleness, num_steps) * groups_per_step
        for ticket in range(issued, limit):
            own_step = ticket // groups_per_step
            groups[ticket] = Group(
                ticket, own_step, ticket_min_version=max(0, own_step - max_staleness), group_size=1
            )
        issued = limit
        places = groups_per_step
        while places:
            chosen = select(
                groups,
                complete,
                step=step,
                places=places,
                groups_per_step=groups_per_step,
                max_staleness=max_staleness,
            )
            for ticket in chosen:
                complete.remove(ticket)
                trained.append((ticket, step, groups.pop(ticket).started_version))
            places -= len(chosen)
            if places and not chosen:
                _let_a_random_group_advance(rng, groups, complete, step)
    return trained


def _let_a_random_group_advance(
    rng: random.Random, groups: dict[int, Group], complete: list[int], version: int
) -> None:
    unfinished = [group for group in groups.values() if group.ticket not in complete]
    assert unfinished, "nothing may be taken and nothing is missing: the run would hang"
    group = rng.choice(unfinished)
    if group.started_version < 0:
        group.started_version = rng.randint(group.ticket_min_version, version)
    else:
        complete.append(group.ticket)


def limit_of(rounds: int | None = None, **trainer: Any) -> ReplacementLimit:
    """Of a run with two groups in a step."""
    algorithm = {"filter_zero_variance": True, "max_filter_rounds": rounds}
    return ReplacementLimit(trainer_config(algorithm=algorithm, **trainer).trainer, "a-run")


Event = Callable[[ReplacementLimit], None]


def filtered(*rewards: float) -> Event:
    """Groups are replaced, of which each has one reward for all its samples."""

    def replace(limit: ReplacementLimit) -> None:
        for reward in rewards:
            limit.note_replaced(7, ZERO_VARIANCE, "", [reward, reward])

    return replace


def replaced(reason: str, detail: str = "", times: int = 1) -> Event:
    def replace(limit: ReplacementLimit) -> None:
        for _ in range(times):
            limit.note_replaced(7, reason, detail, ())

    return replace


TRAINED: Event = ReplacementLimit.note_trained


@pytest.mark.parametrize(
    ("rounds", "before", "last", "said"),
    [
        # Three rounds are the step's own groups and twice as many replacements.
        (3, [filtered(0, 0, 0, 0)], filtered(0), r"a step of 2 groups needs more than 3 times .*: 5 groups"),
        (2, [filtered(0.25, 0.25)], filtered(0.25),
         r"reward is constant: it was 0\.25 for every sample .* trace 7 a-run`\)"),
        # Rewards are equal within groups only.
        (2, [filtered(0, 1)], filtered(0), r"Rewards were 0 in 2 groups, 1 in 1 groups recently: prompts"),
        # A group that can be trained does not limit_of the reward constant, and not the bound larger.
        (2, [filtered(0), TRAINED, filtered(0)], filtered(1), "3 groups were replaced"),
        # Each step begins anew, and other reasons do not count as rounds.
        (1, [replaced(STALE, times=5), ReplacementLimit.begin_step], filtered(0), "more than 1 times"),
        # A trainer that resumes within a step goes on counting.
        (2, [lambda limit: limit.begin_step([ZERO_VARIANCE, "stale", ZERO_VARIANCE])], filtered(0),
         "3 groups were replaced"),
        # Without a bound it takes so many in a row.
        (None, [filtered(*[1] * LEAST_GIVE_UP)], filtered(1), r"257 groups in a row .* constant: it was 1 "),
        (None, [filtered(*[1] * LEAST_GIVE_UP)], replaced(STALE, "two steps"),
         "could not be trained, the last one because of 'stale' two steps"),
    ],
)  # fmt: skip
def test_one_replacement_too_many_ends_the_run_and_says_why(rounds, before, last, said):
    limit = limit_of(rounds)
    for event in before:
        event(limit)
    with pytest.raises(ConfigError, match=said):
        last(limit)


def test_groups_replaced_in_a_row_are_a_warning_that_names_the_reason_each_time_they_double():
    limit = limit_of()
    with structlog.testing.capture_logs() as logs:
        for event in (replaced("no_reward", "why", 20), TRAINED, replaced("no_reward", "why", 7)):
            event(limit)
    assert [(entry["groups_in_a_row"], entry["last_reason"]) for entry in logs] == (
        [(8, "no_reward"), (16, "no_reward")]
    )
