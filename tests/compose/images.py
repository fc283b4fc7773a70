"""Images for the test: ours, CPU variants, built from their Dockerfiles."""

from tests.compose.docker import Docker
from tests.support.preloaded import REPO

TAG = "compose-test"
CPU, PYTHON = f"tidemill-cpu:{TAG}", "python:3.11-slim-bookworm"
OURS = {
    "trainer": ("services/trainer/Dockerfile", CPU),
    "rollout": ("services/rollout/Dockerfile", CPU),
    "reward-model": ("services/reward/model_server/Dockerfile", CPU),
    "reward": ("services/reward/Dockerfile", PYTHON),
    "console": ("services/console/Dockerfile", PYTHON),
}


def make_images(docker: Docker) -> None:
    """Build everything; what was built before and has not changed is taken from Docker's cache."""
    build(docker, CPU, "infra/images/cpu.Dockerfile", "PYTHON_IMAGE", PYTHON)
    for name, (dockerfile, base) in OURS.items():
        build(docker, f"tidemill/{name}:{TAG}", dockerfile, "BASE_IMAGE", base)


def build(docker: Docker, tag: str, dockerfile: str, argument: str, base: str) -> None:
    """One image, from the repository."""
    print(f"building {tag}", flush=True)
    docker(
        "build", "-q", "-t", tag, "-f", str(REPO / dockerfile), "--build-arg", f"{argument}={base}", str(REPO)
    )
