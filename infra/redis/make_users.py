"""Passwords for the users of `users.acl`: `python infra/redis/make_users.py FOLDER [--run RUN_ID ...]`.

Writes into FOLDER a `users.acl` for the server, which holds hashes only, and `passwords.env` with a password
for each user, such as TRAINER_PASSWORD. With `--run`, each of these runs has a trainer and workers of its own
besides (`RUN_ID.trainer`, `RUN_ID.rollout` and so on, passwords in `RUN_ID.env`), which reach no key of
another run, and the users of all runs are off. Passwords that are there already are kept, so that it can be
run again after a change of the rules, or with another run. Needs nothing but Python.
"""

import argparse
import hashlib
import os
import re
import secrets
import sys
from pathlib import Path

RULES = Path(__file__).with_name("users.acl")
PASSWORD_BYTES = 24
PASSWORDS = "passwords"
OF_A_RUN = ("trainer", "rollout", "reward", "sandbox")
"""Users that can be made for one run."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the users of Redis.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--run", action="append", default=[], metavar="RUN_ID", dest="runs")
    parser.add_argument(
        "--cluster", action="store_true", help="for a Redis Cluster, where RQ's keys name the run"
    )
    options = parser.parse_args()
    if wrong := [run for run in options.runs if not RUN_ID.fullmatch(run)]:
        sys.exit(f"{wrong[0]!r} is no id of a run: expected letters, digits, '.', '_' and '-'")
    if reserved := [run for run in options.runs if run.casefold() == PASSWORDS]:
        sys.exit(f"{reserved[0]}.env is the file of the users of all runs: give the run another id")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    text = RULES.read_text(encoding="utf-8")
    every = (text.replace("~rq:", "~rq:{*}:") if options.cluster else text).splitlines()
    rules = [_switched_off(line) if options.runs and _name(line) in OF_A_RUN else line for line in every]
    lines = _with_passwords(rules, folder / f"{PASSWORDS}.env")
    for run in options.runs:
        narrowed = [_of_run(line, run) for line in every if _name(line) in OF_A_RUN]
        lines += [
            line.replace(" ", f" {run}.", 1) for line in _with_passwords(narrowed, folder / f"{run}.env")
        ]
    _write(folder / "users.acl", lines, 0o644)  # Redis runs as a user of its own; hashes are no secret
    print(f"wrote {folder / 'users.acl'}, and passwords beside it")


def _name(line: str) -> str:
    return line.split(" ")[1]


def _switched_off(line: str) -> str:
    return f"user {_name(line)} off"


def _of_run(line: str, run: str) -> str:
    """The same rules for one run; `Keys` in `common/wire/keys.py` spells its names."""
    digest = hashlib.sha256(run.encode()).hexdigest()[:16]
    for every, single in (
        ("tidemill:{*}:", f"tidemill:{{{run}}}:"),
        (":tidemill:*:", f":tidemill:{run}:"),
        ("rq:{*}:", f"rq:{{{run}}}:"),
        (":sandbox-*", f":sandbox-{digest}-*"),
    ):
        line = line.replace(every, single)
    return line


def _with_passwords(rules: list[str], path: Path) -> list[str]:
    """The users with hashes of the passwords in the file, which is given those that it lacks."""
    passwords = _read_passwords(path)
    lines = [_with_password(line, passwords) for line in rules]
    _write(path, [f"{name}={value}" for name, value in passwords.items()], 0o600)
    return lines


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
    if path.is_dir():
        path.rmdir()  # Docker puts an empty one where it is to mount a file that is not there
    path.touch(mode)
    os.chmod(path, mode)  # before the content, and for a file that was there
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
