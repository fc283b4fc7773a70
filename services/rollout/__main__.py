"""`python -m services.rollout --run RUN_ID`: turn tickets into trajectories. Wiring only."""

import sys

from common.process.service import ServiceMain, run_service


def load() -> ServiceMain:
    """Import what is heavy, once address and run are known to be good."""
    from services.rollout.service import serve

    return serve


if __name__ == "__main__":
    sys.exit(
        run_service(
            "rollout",
            "Generate completions for tickets, following the newest weights.",
            load,
            lambda config: config.rollout.metrics_port,
        )
    )
