"""Plays each task twice, in boxes of their own: its test must pass after its solution, and fail without it.

    python examples/containers/oracle.py [NAME ...]

Needs Docker and the tasks' image (see Dockerfile). Exit code 0: all is as expected; 1: the tasks that are
named are not; 2: a box could not be used.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from task_folder import TEST, USER, WORKDIR, TaskFolder, read_tasks

LABEL = "tidemill.oracle=1"
LIFETIME_S = 600
TEST_TIMEOUT_S = 60


class BoxError(Exception):
    """A box could not be started, or is gone."""


def docker(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of Docker's client."""
    return subprocess.run(["docker", *arguments], input=text, capture_output=True, text=True)


def must(*arguments: str, text: str = "") -> str:
    """The same; one that fails is an error."""
    done = docker(*arguments, text=text)
    if done.returncode:
        raise BoxError(f"docker {arguments[0]}: {done.stderr.strip()[-300:]}")
    return done.stdout.strip()


def write(box: str, path: str, content: str) -> None:
    """Write a file as root."""
    script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
    must("exec", "-i", box, "sh", "-c", script, "sh", path, text=content)


def play(task: TaskFolder, is_solved: bool) -> bool:
    """Whether the task's test passes, after its solution or after nothing."""
    limits = ("--network", "none", "--memory", "512m", "--pids-limit", "256")
    started = ("-d", "--rm", "--label", LABEL, *limits, task.image, "sleep", str(LIFETIME_S))
    box = must("run", *started)
    try:
        for name, content in task.files.items():
            write(box, f"{WORKDIR}/{name}", content)
        must("exec", box, "chown", "-R", f"{USER}:{USER}", WORKDIR)
        if is_solved:
            done = docker("exec", "-i", "-u", USER, "-w", WORKDIR, box, "bash", "-s", text=task.solution)
            if done.returncode:
                print(f"{task.name}: its solution ended with exit code {done.returncode}: {done.stderr}")
        write(box, TEST, task.test)
        done = docker("exec", "-w", "/", box, "timeout", str(TEST_TIMEOUT_S), "bash", TEST)
        # Where the box is gone, the exit code is not the test's.
        must("exec", box, "true")
        return done.returncode == 0
    finally:
        docker("rm", "-f", "-v", box)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tasks; without one: all")
    options = parser.parse_args()
    tasks = {task.name: task for task in read_tasks()}
    unknown = sorted(set(options.names) - tasks.keys())
    if unknown:
        parser.error(f"there is no task {', '.join(unknown)}; there are {', '.join(tasks)}")
    chosen = [tasks[name] for name in options.names or tasks]
    try:
        must("version")
        for image in sorted({task.image for task in chosen}):
            must("image", "inspect", image)
        with ThreadPoolExecutor(4) as pool:
            solved = list(pool.map(lambda task: play(task, True), chosen))
            untouched = list(pool.map(lambda task: play(task, False), chosen))
    except (BoxError, FileNotFoundError) as error:
        print(f"no task was judged: {error}", file=sys.stderr)
        return 2
    for task, is_right, is_wrong in zip(chosen, solved, untouched, strict=True):
        if not is_right:
            print(f"{task.name}: the test fails after its solution")
        if is_wrong:
            print(f"{task.name}: the test passes though nothing was done")
    print(f"solution: {sum(solved)} of {len(chosen)}; nothing: {sum(untouched)} of {len(chosen)}")
    return 0 if all(solved) and not any(untouched) else 1


if __name__ == "__main__":
    sys.exit(main())
