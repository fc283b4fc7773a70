"""`python -m tidemill.services.rollout --run RUN_ID`: turn tickets into trajectories. Wiring only."""

import sys

from tidemill.common.process.service import ServiceMain, run_service


def load() -> ServiceMain:
    """Import what is heavy, once address and run are known to be good."""
    from tidemill.services.rollout.service import serve

    return serve


if __name__ == "__main__":
    sys.exit(
        run_service(
            "rollout",
            "Generate completions for tickets, following the newest weights.",
            load,
        )
    )
