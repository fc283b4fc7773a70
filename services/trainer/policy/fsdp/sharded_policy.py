"""One policy over several ranks, seen from rank 0 as a policy like any other.

Every call is broadcast and then made on all ranks alike, each on its own shard (`rank_policy.py`), so that
their collective operations meet. A call returns when rank 0's part of it is done, and no other rank ever
makes a call that rank 0 does not make. Samples are not in it: within the call each rank is sent its own.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.policy import Policy
from tidemill.services.trainer.weights.peers import pack, unpack

STOP = "stop"
OF_SAMPLES = ("accumulate", "precompute")
"""Calls whose first argument only rank 0 has."""
OF_RANK_0 = ("coefficients", "state")
"""Calls that rank 0 makes on its own shard alone: `coefficients`, also from other threads than the policy's,
and `state`, its own part; `begin_saving` writes the parts of all ranks."""


class ShardedPolicy:
    """Implements `Policy` on rank 0; `shard` is its part. Every method that is not here is called on all
    ranks."""

    def __init__(self, shard: Policy, ranks: Ranks) -> None:
        self._own = shard
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        # Code that looks for an optional method (`copy`, say) must not start a call of all ranks.
        if name not in Policy.__dict__:
            raise AttributeError(name)
        if name in OF_RANK_0 or isinstance(Policy.__dict__[name], property):
            return getattr(self._own, name)
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        # Before the own part, in which this rank waits for the others.
        self._tell(name, (None, *args[1:]) if name in OF_SAMPLES else args)
        return getattr(self._own, name)(*args)

    def _tell(self, name: str, args: Sequence[Any] = ()) -> None:
        """Have the other ranks make a call, whose arguments are numbers, text, paths."""
        self._ranks.broadcast(pack((name, args)))

    def named_parameters_for_export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, gathered from all ranks one by one."""
        self._tell("named_parameters_for_export")
        yield from self._own.named_parameters_for_export()

    def close(self) -> None:
        """Let the other ranks end, once all that is being written is written."""
        self._own.finish_writing()
        self._tell(STOP)
        self._ranks.close()


def serve_calls(shard: Policy, ranks: Ranks) -> None:
    """Make rank 0's calls on this rank's shard, until rank 0 closes."""
    while True:
        name, args = unpack(ranks.broadcast())
        if name == STOP:
            shard.finish_writing()
            return
        answer = getattr(shard, name)(*args)
        if isinstance(answer, Iterator):  # tensors: this rank takes part in what rank 0 gathers
            deque(answer, maxlen=0)
