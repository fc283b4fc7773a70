"""What a release needs: `python -m infra.release check TAG | notes TAG | dist FOLDER | chart FOLDER`."""

import argparse
import io
import os
import re
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CHART = REPO / "infra" / "helm" / "tidemill"
NAMED_IN = {
    "CITATION.cff": r"^version: (\S+)$",
    "docker-compose.yml": r"TIDEMILL_TAG:-([^}]+)\}",
    "infra/helm/tidemill/values.yaml": r"^  tag: (\S+)$",
    "infra/helm/tidemill/Chart.yaml": r'^(?:appVersion|version): "?([^"\s]+)"?$',
}
"""Files that name the version, beside pyproject.toml, and where in them."""


def project() -> dict[str, str]:
    """Name, version and so on, from pyproject.toml."""
    tree: dict[str, dict[str, str]] = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    return tree["project"]


def problems(tag: str, repo: Path = REPO) -> Iterator[str]:
    """What does not fit the tag, one line each; nothing where all is well."""
    version = tag.removeprefix("v")
    if version != project()["version"]:
        yield f"pyproject.toml says {project()['version']}, the tag {tag}"
    for name, pattern in NAMED_IN.items():
        versions = re.findall(pattern, (repo / name).read_text(encoding="utf-8"), re.MULTILINE)
        if set(versions) != {version}:
            yield f"{name} names {', '.join(sorted(set(versions))) or 'no version'}; the tag is {tag}"
    if not section(version, repo):
        yield f"CHANGELOG.md has no part `## [{version}]`, or nothing in it; rename `## [Unreleased]`"


def section(version: str, repo: Path = REPO) -> str:
    """What CHANGELOG.md says about a version, or `Unreleased`; empty where it says nothing."""
    text = (repo / "CHANGELOG.md").read_text(encoding="utf-8")
    match = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else ""


def with_links(text: str, tag: str, address: str) -> str:
    """The text with relative links leading to the files of the tag: a release's page has no files."""
    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", rf"]({address}/blob/{tag}/\1)", text)


def build(folder: Path) -> list[str]:
    """Sdist and wheel by the backend of pyproject.toml (PEP 517), without a network. Returns their names."""
    tree = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    sys.path[:0] = [str(REPO / path) for path in tree.get("backend-path", [])]
    backend = import_module(tree["build-backend"])
    folder.mkdir(parents=True, exist_ok=True)
    return [backend.build_sdist(str(folder)), backend.build_wheel(str(folder))]


def pack(folder: Path) -> Path:
    """The Helm chart as an archive that helm installs; the same bytes from the same files."""
    path = folder / f"tidemill-{project()['version']}.tgz"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(file for file in CHART.rglob("*") if file.is_file()):
            entry = tarfile.TarInfo(f"tidemill/{file.relative_to(CHART).as_posix()}")
            content = file.read_bytes()
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def main() -> int:
    """Returns the exit code: 1 where the tag does not fit."""
    parser = argparse.ArgumentParser(description="Parts of a release.")
    parser.add_argument("what", choices=["check", "notes", "dist", "chart"])
    parser.add_argument("argument", help="a tag, such as v0.2.0; with dist and chart, a folder")
    options = parser.parse_args()
    if options.what == "dist":
        print("\n".join(build(Path(options.argument).resolve())))
    elif options.what == "chart":
        print(pack(Path(options.argument)))
    elif options.what == "notes":
        text = section(options.argument.removeprefix("v"))
        repository = os.environ.get("GITHUB_REPOSITORY")
        address = f"{os.environ.get('GITHUB_SERVER_URL')}/{repository}"
        print(with_links(text, options.argument, address) if repository else text)
        return int(not text)
    else:
        faults = list(problems(options.argument))
        print("\n".join(faults), file=sys.stderr if faults else sys.stdout)
        return int(bool(faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
