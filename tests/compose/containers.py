"""Tests of sessions' containers on a real engine; `make unit` and its like run them on a stand-in."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.compose.docker import Docker, run
from tests.support.preloaded import REPO

IMAGE = "tidemill-sleep:compose-test"
TESTS = ("tests/contract/rollout/test_containers.py", "tests/integration/rollout/test_session_containers.py")


def passes_on_engine(docker: Docker) -> bool:
    """Run the tests with an image that has nothing but this machine's `sleep`; no registry is needed."""
    _import_sleep(docker)
    env = docker.env | {"TIDEMILL_TEST_IMAGE": IMAGE}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, env=env, cwd=REPO).returncode == 0


def _import_sleep(docker: Docker) -> None:
    libraries = run(["ldd", "/bin/sleep"], dict(os.environ)).split()
    files = ["/bin/sleep", *(word for word in libraries if word.startswith("/"))]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file in files:
            tar.add(Path(file).resolve(), arcname=file.lstrip("/"))
    imported = ["docker", "import", "-", IMAGE]
    subprocess.run(imported, env=docker.env, input=archive.getvalue(), check=True, capture_output=True)
