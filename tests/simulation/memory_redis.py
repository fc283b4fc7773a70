"""The Redis in memory as a server for contract tests, which check it as they check real servers.

`TRUSTED` names the contract tests that run against it beside the real servers. The others need what only a
process has: a port, TLS, users, Sentinels, memory that runs out, a death that is a signal.
"""

import time
from typing import Any, cast

from tests.simulation.redis.client import DirectNetwork, MemoryClient
from tests.simulation.redis.server import MemoryServer
from tidemill.common.redis.broker import Broker

MEMORY = "memory"
TRUSTED = frozenset(
    {
        "test_batch_assembler",
        "test_commits",
        "test_consumer",
        "test_consumer_repairs",
        "test_dead_requeue",
        "test_evaluation",
        "test_history_groups",
        "test_limiter",
        "test_parts",
        "test_reconciler",
        "test_reward_cache",
        "test_rollout_group",
        "test_scheduler",
        "test_stream_join",
        "test_streams",
        "test_trainer_lost_tail",
        "test_trainer_restart",
    }
)
NEEDS_A_PROCESS = frozenset(
    {
        "test_a_transaction_that_redis_refuses_for_lack_of_memory_leaves_nothing",
        "test_a_publisher_waits_while_redis_is_full_and_goes_on_when_it_is_not",
        "test_two_runs_on_one_redis_never_touch_each_other",
        "test_one_record_a_call_takes_one_round_trip",
    }
)
"""Tests of those files that need a server's limit on memory, its address or its counts."""


def is_trusted(module: str, test: str) -> bool:
    """Whether a test runs against the Redis in memory too."""
    return module.rpartition(".")[2] in TRUSTED and test not in NEEDS_A_PROCESS


class MemoryRedis:
    """One server without a process."""

    def __init__(self) -> None:
        self.server = MemoryServer(lambda: int(1000 * time.time()))

    def broker(self) -> Broker:
        """A connection to it."""
        return Broker(cast(Any, MemoryClient(DirectNetwork(self.server))))
