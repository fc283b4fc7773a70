"""A stand-in for the `docker` command, for machines without Docker: it says so in its version.

It keeps one file for each container in the folder `STAND_IN_DOCKER`, and knows the few commands that
sessions and the reaper use: `run -d`, `ps`, `info`, `rm`, `kill`. While the file `away` is there, it answers
as the client does without a daemon. `make compose-test` runs the same tests on a real engine.
"""

import itertools
import json
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any

FOLDER = "STAND_IN_DOCKER"
FIELD = re.compile(r'\{\{(?:\.(ID|State|Status)|\.Label "([^"]+)")\}\}')


def main() -> int:
    folder = Path(os.environ[FOLDER])
    command, *arguments = sys.argv[1:]
    if (folder / "away").exists():
        print("Cannot connect to the Docker daemon. Is the docker daemon running?", file=sys.stderr)
        return 1
    if command == "version":
        print("stand-in for docker, of Tidemill's tests: it runs no containers")
    elif command == "run":
        _run(folder, arguments)
    elif command == "info":
        print(folder)
    elif command == "ps":
        _list(folder, arguments)
    elif command in ("rm", "kill"):
        return _end(folder, command, [word for word in arguments if not word.startswith("-")])
    else:
        print(f"the stand-in for docker does not know: {command}", file=sys.stderr)
        return 1
    return 0


def _run(folder: Path, arguments: list[str]) -> None:
    labels = dict(
        value.split("=", 1) for option, value in itertools.pairwise(arguments) if option == "--label"
    )
    container_id = secrets.token_hex(32)
    container = {"labels": labels, "state": "running", "status": "Up 1 second"}
    (folder / f".{container_id}").write_text(json.dumps(container))
    os.replace(folder / f".{container_id}", folder / container_id)  # whole, for those who list
    print(container_id)


def _list(folder: Path, arguments: list[str]) -> None:
    template = arguments[arguments.index("--format") + 1]
    for file in sorted(folder.glob("?" * 64)):
        try:
            container = json.loads(file.read_text())
        except FileNotFoundError:
            continue
        values = {"ID": file.name, "State": container["state"], "Status": container["status"]}

        def value_of(
            field: re.Match[str], values: dict[str, str] = values, of: dict[str, Any] = container
        ) -> str:
            return values[field[1]] if field[1] else str(of["labels"].get(field[2], ""))

        print(FIELD.sub(value_of, template))


def _end(folder: Path, command: str, ids: list[str]) -> int:
    code = 0
    for container_id in ids:
        file = folder / container_id
        if not file.exists():
            print(f"Error response from daemon: No such container: {container_id}", file=sys.stderr)
            code = 1
        elif command == "rm":
            file.unlink(missing_ok=True)
        else:
            ended = {"state": "exited", "status": "Exited (137) 1 second ago"}
            file.write_text(json.dumps(json.loads(file.read_text()) | ended))
    return code


if __name__ == "__main__":
    sys.exit(main())
