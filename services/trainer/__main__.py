"""`python -m tidemill.services.trainer --run RUN_ID [--config FILE]`: schedule, train and commit."""

import argparse
import os
import sys
from pathlib import Path

from tidemill.common.process.service import run_service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--config`: a trainer can register its run by itself, for instance in a container."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="register the run from this YAML file; a run that Redis knows must have the same config",
    )


if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")):  # torchrun has started this one as another rank
        from tidemill.services.trainer.policy.fsdp.rank_main import main

        sys.exit(main())
    sys.exit(
        run_service(
            "trainer",
            "Issue tickets, train on scored groups, commit each step and announce its weights.",
            add_arguments=add_arguments,
        )
    )
