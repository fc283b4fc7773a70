"""Which suspects run beside each other: one that was beside others too often runs alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Delivery
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.quarantine import FEW, Quarantine

ALONE = 4
"""Deliveries from which a sample runs alone."""


class Counts:
    """What a consumer would count: the deliveries that are no longer parked."""

    def __init__(self) -> None:
        self.parked: set[str] = set()

    async def hand_back(self, deliveries: list[Delivery[Any]]) -> None:
        assert not deliveries

    async def park(self, deliveries: list[Delivery[Any]]) -> None:
        self.parked.update(delivery.entry_id for delivery in deliveries)

    async def unpark(self, deliveries: list[Delivery[Any]]) -> None:
        self.parked.difference_update(delivery.entry_id for delivery in deliveries)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ((3,) * FEW, [FEW]),
        ((4, 4, 5), [1, 1, 1]),
        ((4, 4, 3, 4), [1, 1, 1, 1]),
        ((4, 3, 3, 4), [2, 1, 1]),
    ],
)
async def test_a_sample_that_may_only_run_alone_runs_beside_no_other_and_counts_from_then(attempts, expected):
    context = ServiceContext(
        "reward", "w", Keys("r"), make_config(streams={"max_attempts": 5}), None, Path(), Activity("reward")
    )
    quarantine = Quarantine(context)
    counts = Counts()
    running: list[Delivery[Any]] = []
    groups: list[int] = []
    not_alone: list[list[int]] = []
    uncounted: set[str] = set()

    def start(delivery: Delivery[Any]) -> None:
        running.append(delivery)
        quarantine.began()
        if len(running) == 1:
            asyncio.get_running_loop().call_soon(end_all)

    def end_all() -> None:
        if len(running) > 1 and max(delivery.attempts for delivery in running) >= ALONE:
            not_alone.append([delivery.attempts for delivery in running])
        uncounted.update(counts.parked & {delivery.entry_id for delivery in running})
        groups.append(len(running))
        for _ in running:
            quarantine.ended()
        running.clear()

    suspects = [
        Delivery(f"1-{ticket}", {}, make_trajectory(ticket), number) for ticket, number in enumerate(attempts)
    ]
    await quarantine.run_suspects(counts, suspects, start)
    assert not not_alone and not uncounted
    assert groups == expected
