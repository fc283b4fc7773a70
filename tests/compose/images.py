"""Images for the test: ours, CPU variants, built from their Dockerfiles; and what they stand on.

Where no registry can be reached, Debian stands in for the bases: debootstrap makes a root folder with Python,
Redis and Prometheus, which is imported. Wheels are fetched by this machine's pip, as it is configured, and
are part of that base, so that no build needs a network. Grafana has no stand-in: it is left out then.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.compose.docker import Docker, MissingError
from tests.support.preloaded import REPO

TAG = "compose-test"
CPU = f"tidemill-cpu:{TAG}"
PYTHON = f"tidemill-python:{TAG}"
DEBIAN = f"tidemill-debian:{TAG}"
PACKAGES = (
    "python3,python3-pip,ca-certificates,redis-server,prometheus,prometheus-redis-exporter,libgomp1,"
    "bubblewrap,libseccomp2"
)
SUITE = "bookworm"
PULLED = {
    "PYTHON_BASE": "python:3.11-slim-bookworm", "REDIS_IMAGE": "redis:8.2-bookworm",
    "REDIS_EXPORTER_IMAGE": "oliver006/redis_exporter:v1.74.0", "PROMETHEUS_IMAGE": "prom/prometheus:v3.5.0",
    "GRAFANA_IMAGE": "grafana/grafana:12.1.0",
}  # fmt: skip
STAND_INS = {
    "REDIS_IMAGE": "RUN mkdir /data && chown redis:redis /data\nUSER redis\nVOLUME /data",
    "PROMETHEUS_IMAGE": "RUN mkdir /prometheus && chown nobody /prometheus\nUSER nobody\n"
    'ENTRYPOINT ["/usr/bin/prometheus"]',
    "REDIS_EXPORTER_IMAGE": 'USER nobody\nENTRYPOINT ["/usr/bin/prometheus-redis-exporter"]',
}
OURS = {
    "trainer": ("services/trainer/Dockerfile", CPU),
    "rollout": ("services/rollout/Dockerfile", CPU),
    "reward-model": ("services/reward/model_server/Dockerfile", CPU),
    "reward": ("services/reward/Dockerfile", PYTHON),
    "console": ("services/console/Dockerfile", PYTHON),
}


@dataclass
class Images:
    """What was built: variables for .env, and services for which there is no image."""

    settings: dict[str, str] = field(default_factory=lambda: {"TIDEMILL_TAG": TAG})
    left_out: set[str] = field(default_factory=set)


def make_images(docker: Docker, work: Path) -> Images:
    """Build everything; what was built before and has not changed is taken from Docker's cache."""
    images = Images()
    if can_pull(docker, PULLED["PYTHON_BASE"]):
        images.settings |= PULLED
        docker("tag", PULLED["PYTHON_BASE"], PYTHON)
        pip = []
    else:
        _stand_in(docker, work, images)
        pip = ["--network", "none"]
    build(docker, CPU, "infra/images/cpu.Dockerfile", "PYTHON_IMAGE", PYTHON, pip)
    for name, (dockerfile, base) in OURS.items():
        build(docker, f"tidemill/{name}:{TAG}", dockerfile, "BASE_IMAGE", base, pip)
    return images


def build(docker: Docker, tag: str, dockerfile: str, argument: str, base: str, options: list[str]) -> None:
    print(f"building {tag}", flush=True)
    options_of_build = [
        "-q",
        "-t",
        tag,
        "-f",
        str(REPO / dockerfile),
        "--build-arg",
        f"{argument}={base}",
        *options,
    ]
    docker("build", *options_of_build, str(REPO))


def can_pull(docker: Docker, image: str) -> bool:
    return docker.has_image(image) or docker.succeeds("pull", "-q", image)


def _stand_in(docker: Docker, work: Path, images: Images) -> None:
    print("no registry can be reached: Debian stands in for the base images", flush=True)
    if not docker.has_image(DEBIAN):
        import_debian(docker, work, DEBIAN, PACKAGES)
    wheels = _fetch_wheels(work)
    conf = "printf '[global]\\nno-index = true\\nfind-links = /wheels\\n' > /etc/pip.conf"
    _build_from_debian(docker, PYTHON, f"COPY wheels /wheels\nRUN {conf}", wheels.parent)
    for variable, lines in STAND_INS.items():
        tag = f"tidemill-{variable.removesuffix('_IMAGE').lower().replace('_', '-')}:{TAG}"
        _build_from_debian(docker, tag, lines, _empty(work))
        images.settings[variable] = tag
    images.left_out.add("grafana")


def import_debian(docker: Docker, work: Path, tag: str, packages: str) -> None:
    """Make an image of Debian and these packages without a registry."""
    if shutil.which("debootstrap") is None:
        raise MissingError("no registry can be reached, and debootstrap is not on PATH (Debian: debootstrap)")
    root = work / "debian"
    shutil.rmtree(root, ignore_errors=True)
    print("making a Debian with debootstrap", flush=True)
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise MissingError(f"debootstrap failed, has it root and a mirror?\n{ended.stdout[-1500:]}")
    for cached in (root / "var/cache/apt/archives").glob("*.deb"):
        cached.unlink()
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        docker("import", "-", tag, stdin=tar.stdout)
    shutil.rmtree(root)


def _fetch_wheels(work: Path) -> Path:
    """What requirements/base.lock pins, by this machine's pip: a folder beside nothing else."""
    wheels = work / "context" / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    print("fetching wheels", flush=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels)]
    command += ["--find-links", str(wheels), "-r", str(REPO / "requirements/base.lock")]
    subprocess.run(command, check=True, capture_output=True)
    return wheels


def _build_from_debian(docker: Docker, tag: str, lines: str, context: Path) -> None:
    docker("build", "-q", "-t", tag, "-f", "-", str(context), input=f"FROM {DEBIAN}\n{lines}\n")


def _empty(work: Path) -> Path:
    folder = work / "empty"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
