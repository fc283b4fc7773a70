"""The passwords of Redis's users: what `infra/redis/make_users.py` writes, and what it leaves alone."""

import hashlib
import subprocess
import sys
from pathlib import Path

from tidemill.common.process.programs import ROOT


def make(folder: Path, *options: str) -> int:
    command = [sys.executable, str(ROOT / "infra/redis/make_users.py"), str(folder), *options]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_a_run_cannot_be_called_like_the_file_of_all_runs(tmp_path: Path) -> None:
    assert make(tmp_path) == 0
    before = (tmp_path / "passwords.env").read_text()
    for name in ("passwords", "Passwords"):
        assert make(tmp_path, "--run", name) == 1
    assert (tmp_path / "passwords.env").read_text() == before
    assert make(tmp_path, "--run", "mine") == 0 and "TRAINER_PASSWORD=" in (tmp_path / "mine.env").read_text()


def test_passwords_are_made_once_for_their_owner_alone_and_the_server_gets_their_hashes(tmp_path):
    (tmp_path / "users.acl").mkdir()  # as Docker does, where Compose was started first
    assert make(tmp_path) == 0
    file = tmp_path / "passwords.env"
    first = file.read_text()
    assert make(tmp_path) == 0
    assert file.read_text() == first and file.stat().st_mode & 0o077 == 0
    users = (tmp_path / "users.acl").read_text()
    for password in (line.partition("=")[2] for line in first.splitlines()):
        assert password not in users and hashlib.sha256(password.encode()).hexdigest() in users
