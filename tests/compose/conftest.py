"""Of every test of sessions in containers: the example's modules, and containers that it must not leave."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.compose.sessions import EXAMPLE, containers

BRIDGE = "tidemill-test"


@pytest.fixture
def bridge() -> Iterator[str]:
    """A network for another engine: that of this machine's must not have two."""
    for command in (
        f"link add name {BRIDGE} type bridge",
        f"addr add 172.30.99.1/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    yield BRIDGE
    subprocess.run(["ip", "link", "del", BRIDGE], check=True)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = containers()
    yield
    assert containers() == before
