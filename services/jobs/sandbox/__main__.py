"""`python -m tidemill.services.jobs.sandbox --run RUN_ID`: one sandbox worker of a run."""

import sys

from tidemill.common.process.service import ServiceMain, run_service


def main() -> int:
    return run_service("jobs.sandbox", "Runs code of a run's completions apart from it.", _load)


def _load() -> ServiceMain:
    from tidemill.services.jobs.sandbox.worker import serve

    return serve


if __name__ == "__main__":
    sys.exit(main())
