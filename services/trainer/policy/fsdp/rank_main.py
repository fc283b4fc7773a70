"""`python -m tidemill.services.trainer.policy.fsdp.rank_main`: a rank trains what rank 0 hands out.

It needs no Redis: the config and every call to the policy come from rank 0. Signals are for rank 0 too: it
drains, and then tells the other ranks to end.
"""

import signal
import sys

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError
from tidemill.common.process.children import end_with_parent
from tidemill.common.process.privacy import hide_memory
from tidemill.common.telemetry.logs import configure_logs
from tidemill.services.trainer.policy.fsdp.ranks import Ranks, join_ranks
from tidemill.services.trainer.policy.fsdp.sharded_policy import serve_calls
from tidemill.services.trainer.weights.peers import unpack


def run_rank(ranks: Ranks) -> None:
    """Load this rank's share of the policy, and make rank 0's calls until it closes."""
    from tidemill.services.trainer.policy.fsdp.rank_policy import load_rank_policy

    config_json, run_dir = unpack(ranks.broadcast())
    config = RunConfig.model_validate_json(config_json)
    serve_calls(load_rank_policy(config, ranks, run_dir), ranks)
    ranks.close()


def main(parent: int | None = None) -> int:
    """Run one rank to its end; returns the exit code. `parent` is the process that started it, where that is
    rank 0: this one ends when it dies, because a collective call on a GPU would wait for it."""
    hide_memory()  # its environment is the trainer's, which may hold secrets
    if parent is not None:
        end_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ranks = join_ranks()
    configure_logs("trainer", f"trainer-rank-{ranks.rank}")
    try:
        run_rank(ranks)
    except TidemillError as error:
        print(f"tidemill trainer, rank {ranks.rank}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
