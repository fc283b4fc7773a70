"""Writes what docker-compose.yml needs: `.env` with all secrets, and the users of Redis.

    python infra/make_env.py                                     # on the head, in the root of the repository
    python infra/make_env.py --node 10.0.0.5 rollout reward      # prints the .env of another node

Settings and secrets that are there already are kept, so that it can be run again. A node is given the
passwords of the services it runs, and no others. Needs nothing but Python.
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ENV = ".env"
EXAMPLE = ".env.example"
COMPOSE = "docker-compose.yml"
LOOPBACK = "127.0.0.1"
TOKENS = ("TIDEMILL_WEIGHTS_TOKEN", "TIDEMILL_MODEL_TOKEN", "GRAFANA_PASSWORD")
TOKEN_BYTES = 24
COPIED = (
    "TIDEMILL_RUN_ID", "TIDEMILL_DATA", "TIDEMILL_TAG", "TIDEMILL_IMAGES", "TIDEMILL_REDIS_CA",
    "TIDEMILL_GPU_RUNTIME", "ROLLOUT_GPUS_EACH", "REWARD_MODEL_GPUS_EACH", "SERVERS_NAME",
)  # fmt: skip
"""Settings that a node copies from the head."""
SECRETS_OF = {
    "rollout": ("ROLLOUT_PASSWORD", "TIDEMILL_WEIGHTS_TOKEN"),
    "reward": ("REWARD_PASSWORD", "TIDEMILL_MODEL_TOKEN"),
    "reward-model": ("REWARD_PASSWORD", "TIDEMILL_MODEL_TOKEN"),
}
"""Secrets that a node gets, by profile."""


def main() -> None:
    """Write the head's files, or print a node's."""
    parser = argparse.ArgumentParser(description="Make .env for docker-compose.yml.")
    add = parser.add_argument
    add("--folder", type=Path, default=REPO, help="where .env and secrets/ are (default: the repository)")
    add("--node", metavar="HEAD", help="print the .env of a node that reaches the head at this address")
    add("profiles", nargs="*", metavar="PROFILE", help=f"with --node: {', '.join(SECRETS_OF)}")
    options = parser.parse_args()
    if unknown := set(options.profiles) - set(SECRETS_OF):
        parser.error(f"unknown profiles: {', '.join(sorted(unknown))}; a node has {', '.join(SECRETS_OF)}")
    if bool(options.node) != bool(options.profiles):
        parser.error("--node HEAD and the profiles of the node belong together")
    if options.node:
        print(node_settings(options.folder, options.node, options.profiles))
    else:
        write_head(options.folder)


def write_head(folder: Path) -> None:
    """Write .env and secrets/, keeping every value that is there."""
    path = folder / ENV
    example = (REPO / EXAMPLE).read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8") if path.exists() else example
    settings = read_settings(text)
    users = Path(settings.get("TIDEMILL_SECRETS") or "./secrets")
    users = users if users.is_absolute() else folder / users
    make_users = REPO / "infra" / "redis" / "make_users.py"
    subprocess.run([sys.executable, str(make_users), str(users)], check=True)
    values = read_settings((users / "passwords.env").read_text(encoding="utf-8"))
    values |= {name: settings.get(name) or secrets.token_urlsafe(TOKEN_BYTES) for name in TOKENS}
    wanted = set(read_settings(example))
    path.touch(0o600)
    os.chmod(path, 0o600)  # before the content, and for a file that was there
    path.write_text(filled(text, {name: values[name] for name in values if name in wanted}), encoding="utf-8")
    print(f"wrote {path}")
    offered = re.findall(r"^#?([A-Z][A-Z_]+)=", example, re.MULTILINE)
    if unread := sorted(set(settings) - set(offered)):
        _warn(f"{path}: nothing reads {', '.join(unread)}. {EXAMPLE} has every setting of this release")


def node_settings(folder: Path, head: str, profiles: list[str]) -> str:
    if not (folder / ENV).exists():
        sys.exit(f"there is no {folder / ENV}: run this on the head, first without --node")
    settings = read_settings((folder / ENV).read_text(encoding="utf-8"))
    lines = [f"{name}={settings[name]}" for name in COPIED if name in settings]
    if (bind := settings.get("TIDEMILL_BIND") or LOOPBACK) == LOOPBACK != head:
        _warn(
            f"{folder / ENV}: with TIDEMILL_BIND={bind} no node reaches the head; give it {head}, and `up -d`"
        )
    scheme = "rediss" if settings.get("TIDEMILL_REDIS_URL", "").startswith("rediss:") else "redis"
    lines.append(f"TIDEMILL_REDIS_URL={scheme}://{head}:{settings.get('REDIS_PORT', '6379')}/0")
    if "rollout" in profiles:
        lines.append(f"TIDEMILL_WEIGHTS_URL=http://{head}:{settings.get('WEIGHTS_PORT', '8200')}")
    files = [COMPOSE, *(["infra/compose/cpu.yml"] if "cpu.yml" in settings.get("COMPOSE_FILE", "") else [])]
    lines += [f"COMPOSE_FILE={':'.join([*files, 'infra/compose/node.yml'])}", "TIDEMILL_METRICS_PORT=0"]
    names = dict.fromkeys(name for profile in profiles for name in SECRETS_OF[profile])
    return "\n".join([*lines, *(f"{name}={settings[name]}" for name in names)])


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)  # the settings of a node are on stdout


def read_settings(text: str) -> dict[str, str]:
    """Name and value of every line that has both."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def filled(text: str, values: dict[str, str]) -> str:
    """The text with these values; what it does not name yet is appended."""
    lines = []
    unplaced = dict(values)
    for line in text.splitlines():
        name = line.partition("=")[0]
        lines.append(f"{name}={unplaced.pop(name)}" if name in unplaced else line)
    return "\n".join([*lines, *(f"{name}={value}" for name, value in unplaced.items())]) + "\n"


if __name__ == "__main__":
    main()
