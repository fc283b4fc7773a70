"""`python -m services.trainer --run RUN_ID`: schedule, train and commit. Wiring only."""

import os
import sys

from common.service import ServiceMain, run_service


def load() -> ServiceMain:
    """Import what is heavy, once address and run are known to be good."""
    from services.trainer.service import serve

    return serve


if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")):  # torchrun has started this one as a follower
        from services.trainer.follower import main

        sys.exit(main())
    sys.exit(
        run_service(
            "trainer",
            "Issue tickets, train on scored groups, commit each step and announce its weights.",
            load,
            lambda config: config.trainer.metrics_port,
        )
    )
