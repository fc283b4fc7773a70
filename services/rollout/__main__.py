"""`python -m tidemill.services.rollout --run RUN_ID`: turn tickets into trajectories. Wiring only."""

import sys

from tidemill.common.process.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("rollout", "Generate completions for tickets, following the newest weights."))
