"""`python -m tidemill.services.reward.sandbox --run RUN_ID`: one sandbox worker of a run."""

import sys

from tidemill.common.process.programs import Program
from tidemill.common.process.service import run_service

if __name__ == "__main__":
    description = "Runs code of a run's completions apart from it."
    sys.exit(run_service("sandbox", description, program=Program.SANDBOX))
