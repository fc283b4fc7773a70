"""Tests of sessions' containers on a real engine; `make unit` and its like run the first of them on a
stand-in. The others play examples/containers with verifiers and agentbox-rl."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.compose.docker import Docker, run
from tests.compose.images import can_pull, import_debian
from tests.support.preloaded import REPO

IMAGE = "tidemill-sleep:compose-test"
EXAMPLE = REPO / "examples" / "containers"
BOXES = ("tests/compose/boxes.py", "tests/compose/kills.py", "tests/compose/trains.py")
TASKS = "tidemill-tasks:1"
BASE = "debian:bookworm-slim"
DEBIAN = "tidemill-box-base:compose-test"
PACKAGES = "ca-certificates,curl,git,make,procps,python3,sqlite3"
VERIFIERS = "verifiers==0.4.0"
AGENTBOX = ("agentbox-rl==0.3.0", "docker==7.1.0")
TESTS = ("tests/contract/rollout/test_containers.py", "tests/integration/rollout/test_session_containers.py")


def passes_on_engine(docker: Docker) -> bool:
    """Run the tests with an image that has nothing but this machine's `sleep`; no registry is needed."""
    _import_sleep(docker)
    env = docker.env | {"TIDEMILL_TEST_IMAGE": IMAGE}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, env=env, cwd=REPO).returncode == 0


def plays_boxes(docker: Docker, work: Path) -> bool:
    """Play the twenty tasks with their solutions and with nothing, by themselves and by verifiers; then the
    tests of sessions in boxes."""
    _build_tasks(docker, work)
    verifiers = work / "verifiers"
    agentbox = work / "agentbox"
    if not (verifiers / "bin" / "vf-validate").exists():
        subprocess.run([sys.executable, "-m", "venv", str(verifiers)], check=True)
        subprocess.run([verifiers / "bin" / "pip", "install", "-q", VERIFIERS], check=True)
    if not (agentbox / "agentbox").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(agentbox)]
        subprocess.run([*pip, *AGENTBOX], check=True)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (EXAMPLE, agentbox)))}
    paths["TIDEMILL_TEST_VERIFIERS"] = str(verifiers / "bin" / "python")
    validate = [verifiers / "bin" / "vf-validate", "boxes", "--runtime.type", "docker", "--no-rich"]
    validate += [
        "--max-concurrent",
        "4",
        "--output-dir",
        work / "validated",
        "--run.name",
        "boxes",
        "--clean",
    ]
    commands = (
        [sys.executable, EXAMPLE / "oracle.py"],
        validate,
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *BOXES],
    )
    env = docker.env | paths
    codes = [subprocess.run([*map(str, command)], env=env, cwd=REPO).returncode for command in commands]
    # The runner of verifiers ends with 0 in any case.
    summaries = sorted((work / "validated").glob("**/summary.json"))
    outcomes = json.loads(summaries[-1].read_text())["checks"] if summaries else {}
    num_tasks = len(list((EXAMPLE / "tasks").iterdir()))
    are_valid = [outcomes.get(check, {}).get("valid") == num_tasks for check in ("gold", "noop")]
    return not any(codes) and all(are_valid)


def _build_tasks(docker: Docker, work: Path) -> None:
    base = BASE
    if not can_pull(docker, BASE):
        base = DEBIAN
        if not docker.has_image(DEBIAN):
            import_debian(docker, work, DEBIAN, PACKAGES)
    docker("build", "-q", "--network", "host", "--build-arg", f"BASE={base}", "-t", TASKS, str(EXAMPLE))


def _import_sleep(docker: Docker) -> None:
    libraries = run(["ldd", "/bin/sleep"], dict(os.environ)).split()
    files = ["/bin/sleep", *(word for word in libraries if word.startswith("/"))]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file in files:
            tar.add(Path(file).resolve(), arcname=file.lstrip("/"))
    imported = ["docker", "import", "-", IMAGE]
    subprocess.run(imported, env=docker.env, input=archive.getvalue(), check=True, capture_output=True)
