"""`python -m tidemill.services.reward --run RUN_ID`: one reward worker; start as many as the rewards need."""

import sys

from tidemill.common.process.service import ServiceMain, run_service


def main() -> int:
    return run_service("reward", "Scores the trajectories of a run.", _load)


def _load() -> ServiceMain:
    from tidemill.services.reward.worker import serve

    return serve


if __name__ == "__main__":
    sys.exit(main())
