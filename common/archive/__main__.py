"""Archives a run's streams: `python -m tidemill.common.archive RUN_ID RUN_DIR`.

The trainer starts it, and trims what is archived. Each entry is archived once, also with two such processes
or after a kill. Runs at low CPU priority.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from tidemill.common.archive.archiver import archive_run
from tidemill.common.errors import TidemillError
from tidemill.common.files import LockedError
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import read_config
from tidemill.common.streams.selection import StreamName
from tidemill.common.wire.keys import Keys

NICENESS = 10


async def archive(
    keys: Keys, run_dir: Path, until: dict[StreamName, str], is_last: bool = False
) -> dict[StreamName, int]:
    """Archive each stream up to its id in `until`; with `is_last` also what does not fill a file.

    Returns how many entries of each stream were new.
    """
    broker = await Broker.connect()
    try:
        streams = (await read_config(broker, keys)).streams
        broker.max_bytes = streams.max_message_mb << 20
        config = streams.archive
        return await archive_run(broker, keys, run_dir, config, until, is_last=is_last)
    except LockedError:
        return {}  # the process with the lock does the same work; the caller starts one again if needed
    finally:
        await broker.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what a run's streams hold into its archive.")
    parser.add_argument("run_id")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--until", action="append", default=[], metavar="STREAM=ID")
    parser.add_argument("--rest", action="store_true", help="also what does not fill a file")
    options = parser.parse_args()
    ends = (item.split("=", 1) for item in options.until)
    until = {StreamName(name): last for name, last in ends} or dict.fromkeys(StreamName, "+")
    hide_memory()  # it holds the password of Redis
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        counts = run_main(archive(Keys(options.run_id), options.run_dir, until, options.rest))
    except TidemillError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print({str(stream): count for stream, count in counts.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
