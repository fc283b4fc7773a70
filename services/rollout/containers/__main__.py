"""`python -m tidemill.services.rollout.containers --run RUN_ID`: remove all containers of a run on this node.

For a run of which nothing runs any more: `tidemill up` does this at its end.
"""

import argparse
import sys

from tidemill.common.process.programs import run_main
from tidemill.services.rollout.containers.command import ContainerCommand, EngineAwayError
from tidemill.services.rollout.containers.names import digest_of


async def remove_of_run(program: str, run_id: str) -> int:
    """Remove the containers of a run's sessions; returns how many.

    Raises:
        EngineAwayError: the engine does not answer.
    """
    command = ContainerCommand(program)
    digest = digest_of(run_id)
    listed = await command.list_containers()
    return await command.remove(each for each in listed if each.session.run == digest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, metavar="RUN_ID", help="the run, which has ended")
    parser.add_argument(
        "--command", choices=("docker", "podman"), default="docker", help="default: %(default)s"
    )
    options = parser.parse_args()
    try:
        num_removed = run_main(remove_of_run(options.command, options.run))
    except EngineAwayError as error:
        print(f"containers of the run {options.run} may be left on this node: {error}")
        return 1
    if num_removed:
        print(f"removed {num_removed} containers that sessions of the run had left on this node")
    return 0


if __name__ == "__main__":
    sys.exit(main())
