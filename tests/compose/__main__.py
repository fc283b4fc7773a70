"""`make compose-test`: images, docker-compose.yml and .env as operators use them, on a real Docker engine.

Needs root, Docker 20.10 or newer, Compose, 15 GB of disk and 15 minutes; without a registry also debootstrap.
Builds the CPU images, does a run of arith on one machine while containers are scaled and killed and Redis is
restarted, and another run that a second node joins over the head's address; before them, tests of sessions'
containers, and sessions of examples/containers. Ends with 0 if nothing was lost and nothing was trained
twice, 1 if something was, 2 if this machine lacks something.
"""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.compose.containers import passes_on_engine, plays_boxes
from tests.compose.docker import Docker, MissingError
from tests.compose.images import make_images
from tests.compose.scenarios import Result, one_machine, two_nodes

SCENARIOS = {"one": one_machine, "two": two_nodes}
CONTAINERS = "containers"
"""Tests of sessions' containers."""
BOXES = "boxes"
"""Sessions of examples/containers, with verifiers and agentbox-rl."""
WORK = Path("/tmp/tidemill-compose")
STEPS = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument(
        "--only", choices=sorted([*SCENARIOS, CONTAINERS, BOXES]), help="one scenario instead of all"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--work", type=Path, default=WORK, help="folder for what is made (default: %(default)s)"
    )
    options = parser.parse_args()
    chosen = [options.only] if options.only else sorted(SCENARIOS)
    has_containers = options.only in (None, CONTAINERS)
    try:
        with Docker(options.work / "engine") as docker:
            # First: they need no images, and an engine without containers.
            if has_containers and not passes_on_engine(docker):
                return 1
            if options.only in (None, BOXES) and not plays_boxes(docker, options.work):
                return 1
            if options.only in (CONTAINERS, BOXES):
                return 0
            docker.compose_command()
            images = make_images(docker, options.work)
            results = []
            for name in chosen:
                print(f"scenario: {name}", flush=True)
                results.append(SCENARIOS[name](docker, images, options.work, options.steps))
    except MissingError as error:
        print(f"compose-test: {error}", file=sys.stderr)
        return 2
    _print(results)
    return 0 if all(result.is_ok for result in results) else 1


def _print(results: list[Result]) -> None:
    table = Table(title="compose-test", title_justify="left")
    for column in ("scenario", "steps", "lost", "trained twice", "evaluation", "seconds", "facts"):
        table.add_column(column)
    for result in results:
        report = result.report
        evaluation = f"{report['eval_before']:.3f} -> {report['eval_after']:.3f}"
        numbers = [str(report[name]) for name in ("steps", "lost", "duplicated_in_training")]
        facts = ", ".join(f"{name} {value}" for name, value in result.facts.items())
        table.add_row(result.scenario, *numbers, evaluation, f"{report['wall_s']:.0f}", facts)
    Console().print(table)
    summary = {}
    for result in results:
        counts = {name: result.report[name] for name in ("steps", "lost", "duplicated_in_training", "wall_s")}
        summary[result.scenario] = {"ok": result.is_ok, **counts, **result.facts}
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
