"""Workflows do what `make` does, with pinned actions and few rights; a release names one version."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from infra.release import __main__ as release

ROOT = release.REPO
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RULES = (ROOT / "Makefile").read_text() + (ROOT / "infra/release/release.mk").read_text()


def jobs(path: Path) -> dict[str, Any]:
    by_name: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return by_name


STEPS = [(path.name, step) for path in WORKFLOWS for job in jobs(path).values() for step in job["steps"]]
RUNS = sorted({step["run"] for _, step in STEPS if "run" in step})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_meets_the_schema_and_asks_for_few_rights(path):
    # YAML 1.1 reads the key `on` as true.
    tree = {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}
    jsonschema.validate(tree, get_builtin_schema("vendor.github-workflows"))
    assert tree["permissions"] == {"contents": "read"}
    for job in tree["jobs"].values():
        assert "timeout-minutes" in job
        assert "secrets." not in str(job.get("env", "")), "a secret belongs to the step that needs it"


def test_actions_are_pinned_by_commit_with_their_version_beside_it() -> None:
    for path in WORKFLOWS:
        for line in re.findall(r"uses: (.+)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("command", RUNS)
def test_a_step_is_a_target_of_make_that_is_there(command: str) -> None:
    match = re.fullmatch(r"make ([a-z-]+)(?: [A-Z_]+=[a-z]+)*", command)
    assert match, "steps are targets, so that they are the same here and there"
    assert re.search(rf"^{match[1]}:.*##", RULES, re.MULTILINE)
    assert "${{" not in command, "an expression in a script can be more than a word"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")
def test_what_make_would_do_for_an_image() -> None:
    words = ["make", "-n", "image", "push-image", "sign-image", "IMAGES=registry.example/tidemill"]
    words += ["IMAGE_NAME=reward-model", "IMAGE_VARIANT=cpu"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    version = release.project()["version"]
    image = f"registry.example/tidemill/reward-model:{version}-cpu"
    assert f"docker build -t {image} -f services/reward/model_server/Dockerfile" in said
    assert f"--build-arg BASE_IMAGE=tidemill-cpu:{version}-cpu" in said
    assert f"docker push {image}\n" in said and "cosign sign --yes" in said and "cosign attest --yes" in said


def test_every_image_of_a_service_is_released_and_those_with_models_for_cpus_too() -> None:
    matrix = jobs(ROOT / ".github/workflows/release.yml")["images"]["strategy"]["matrix"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    images = [service["image"] for service in compose if "TIDEMILL_TAG" in service["image"]]
    assert set(matrix["name"]) == {image.split("/")[-1].partition(":")[0] for image in images}
    without_models = {path for path in ROOT.glob("services/*/Dockerfile") if "slim.lock" in path.read_text()}
    assert {pair["name"] for pair in matrix["exclude"]} == {path.parent.name for path in without_models}


def test_every_file_names_the_version_of_the_project() -> None:
    version = release.project()["version"]
    wrong = [line for line in release.problems(f"v{version}") if not line.startswith("CHANGELOG.md")]
    assert wrong == []
    assert len(list(release.problems("v999.0.0"))) == len(release.NAMED_IN) + 2


def test_the_notes_are_the_part_of_the_changelog_and_their_links_lead_to_the_tag(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n- later\n\n## [0.2.0] - 2027-01-02\n\n- [a](docs/a.md), [b](https://b)\n\n"
        "## [0.1.0]\n\n- old\n"
    )
    text = release.section("0.2.0", tmp_path)
    assert text == "- [a](docs/a.md), [b](https://b)"
    assert release.section("0.1.0", tmp_path) == "- old" and release.section("0.3.0", tmp_path) == ""
    linked = release.with_links(text, "v0.2.0", "https://host/o/r")
    assert linked == "- [a](https://host/o/r/blob/v0.2.0/docs/a.md), [b](https://b)"


def test_forms_for_issues_meet_their_schema_and_the_citation_its_own() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        tree = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert tree["name"] and tree["description"] and {element["type"] for element in tree["body"]}
            assert all(element["type"] == "markdown" or element["id"] for element in tree["body"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
