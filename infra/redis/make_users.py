"""Passwords for the users of `users.acl`: `python infra/redis/make_users.py FOLDER`.

Writes into FOLDER a `users.acl` for the server, which holds hashes only, and `passwords.env` with a password
for each user, such as TRAINER_PASSWORD. Passwords that are there already are kept, so that it can be run
again after a change of the rules. Needs nothing but Python.
"""

import hashlib
import os
import secrets
import sys
from pathlib import Path

RULES = Path(__file__).with_name("users.acl")
PASSWORD_BYTES = 24


def main() -> None:
    """Write both files."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python infra/redis/make_users.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    passwords = _read_passwords(folder / "passwords.env")
    lines = [_with_password(line, passwords) for line in RULES.read_text(encoding="utf-8").splitlines()]
    _write(folder / "passwords.env", [f"{name}={value}" for name, value in passwords.items()], 0o600)
    _write(folder / "users.acl", lines, 0o644)  # Redis runs as a user of its own; hashes are no secret
    print(f"wrote {folder / 'users.acl'} and {folder / 'passwords.env'}")


def _read_passwords(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    pairs = (line.partition("=") for line in path.read_text(encoding="utf-8").splitlines() if "=" in line)
    return {name: value for name, _, value in pairs}


def _with_password(line: str, passwords: dict[str, str]) -> str:
    """A user's line with the hash of its password; users that are off have none."""
    keyword, name, state, *rules = line.split(" ")
    if state != "on":
        return line
    password = passwords.setdefault(f"{name.upper()}_PASSWORD", secrets.token_urlsafe(PASSWORD_BYTES))
    return " ".join((keyword, name, state, "#" + hashlib.sha256(password.encode()).hexdigest(), *rules))


def _write(path: Path, lines: list[str], mode: int) -> None:
    path.touch(mode)
    os.chmod(path, mode)  # before the content, and for a file that was there
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
