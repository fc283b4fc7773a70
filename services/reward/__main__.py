"""`python -m tidemill.services.reward --run RUN_ID`: one reward worker; start as many as the rewards need."""

import sys

from tidemill.common.process.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("reward", "Scores the trajectories of a run."))
