"""`python -m tidemill.services.rollout.containers --uid UID`: remove all containers of a run on this node.

For a run of which nothing runs any more: `tidemill up` does this at its end. The uid, not the id: runs in two
folders may have the same id. It needs no Redis, which may have ended with the run.
"""

import argparse
import sys

from tidemill.common.process.programs import run_main
from tidemill.common.run.state import UID_FILE
from tidemill.services.rollout.containers.command import ContainerCommand, EngineAwayError


async def remove_of_run(program: str, uid: str) -> int:
    """Remove the containers of a run's sessions; returns how many.

    Raises:
        EngineAwayError: the engine does not answer.
    """
    command = ContainerCommand(program)
    listed = await command.list_containers()
    return await command.remove(each for each in listed if each.session.run_uid == uid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--uid",
        required=True,
        help=f"of the run, which has ended: the file {UID_FILE} in its folder; containers have it after "
        "`tidemill-` in a label",
    )
    parser.add_argument(
        "--command", choices=("docker", "podman"), default="docker", help="default: %(default)s"
    )
    options = parser.parse_args()
    try:
        num_removed = run_main(remove_of_run(options.command, options.uid))
    except EngineAwayError as error:
        print(f"containers of the run with the uid {options.uid} may be left on this node: {error}")
        return 1
    if num_removed:
        print(f"removed {num_removed} containers that sessions of the run had left on this node")
    return 0


if __name__ == "__main__":
    sys.exit(main())
