"""The Helm chart gives the objects of the kustomize base, and what its values say.

Where helm and kubectl are on PATH they render, otherwise a reader of the few expressions that there are.
"""

import json
import re
import shutil
import subprocess
import tarfile
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from infra.helm.__main__ import CHART, pack, templates
from tests.unit.infra.test_kubernetes import FOLDER, schema_of

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
HELM, KUBECTL = shutil.which("helm"), shutil.which("kubectl")
Objects = dict[tuple[str, str], Any]


def value_of(expression: str, values: dict[str, Any]) -> str:
    """What helm puts in place of one expression."""
    source, *functions = [part.strip() for part in expression.split("|")]
    scope = {"Values": values, "Release": {"Namespace": "tidemill"}}

    def lookup(word: str) -> Any:
        return (
            word[1:-1]
            if word[0] == '"'
            else reduce(lambda tree, name: tree[name], word[1:].split("."), scope)
        )

    words = source.split()
    found = "".join(lookup(word) for word in words[1:]) if words[0] == "print" else lookup(words[0])
    for function in functions:
        found = {"quote": lambda x: f'"{x}"', "toJson": json.dumps}[function](found)
    return str(found)


def rendered(values: dict[str, Any]) -> str:
    """All templates, one after the other."""
    parts = []
    for path in sorted((CHART / "templates").iterdir()):
        text = path.read_text()
        if found := re.search(r"\{\{- if (\S+) \}\}\n(.*)\{\{- end \}\}", text, re.DOTALL):
            text = found[2] if value_of(found[1], values) == "True" else ""
        parts.append(re.sub(r"\{\{ (.+?) \}\}", lambda found: value_of(found[1], values), text))
    return "\n---\n".join(parts)


def pruned(tree: Any) -> Any:
    """Without what is empty: `nodeSelector: {}` says as much as nothing."""
    if isinstance(tree, dict):
        return {key: pruned(value) for key, value in tree.items() if value not in (None, {}, [])}
    return [pruned(value) for value in tree] if isinstance(tree, list) else tree


def objects(text: str) -> Objects:
    return {(t["kind"], t["metadata"]["name"]): pruned(t) for t in yaml.safe_load_all(text) if t}


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_templates_are_current() -> None:
    written = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    assert written == dict(templates()), "run `python -m infra.helm`"


def test_every_object_fits_the_strict_schema_of_its_kind() -> None:
    everything = VALUES | {"rewardModel": VALUES["rewardModel"] | {"enabled": True}}
    for place, tree in objects(rendered(everything)).items():
        if tree["kind"] == "ConfigMap":
            assert all(isinstance(value, str) for value in tree["data"].values()), place
            continue
        assert (
            tree["metadata"].pop("namespace") == "tidemill"
        )  # which schemas of files for kustomize do not have
        errors = [error.message for error in Draft202012Validator(schema_of(tree["kind"])).iter_errors(tree)]
        assert errors == [], place
    assert ("Deployment", "reward-model") in objects(rendered(everything))


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not on PATH")
def test_it_gives_the_objects_of_kustomize() -> None:
    assert objects(rendered(VALUES)) == objects(told(str(KUBECTL), "kustomize", str(FOLDER)))


@pytest.mark.skipif(HELM is None, reason="helm is not on PATH")
def test_helm_itself_renders_the_same_from_the_archive(tmp_path: Path) -> None:
    archive = str(pack(tmp_path))
    told(str(HELM), "lint", "--strict", archive)
    assert objects(told(str(HELM), "template", "x", archive, "-n", "tidemill")) == objects(rendered(VALUES))


def test_values_reach_what_they_name() -> None:
    gpu = {"limits": {"nvidia.com/gpu": "1"}}
    values = VALUES | {
        "run": {"id": "mine", "config": "/data/c.yaml", "redisUrl": "redis://other:6379/0"},
        "images": {"prefix": "registry.example/t", "tag": "0.2.0"},
        "keda": {"enabled": True, "min": 2, "max": 5},
        "monitoring": {"enabled": False},
        "rollout": VALUES["rollout"] | {"replicas": 3, "resources": gpu, "nodeSelector": {"gpu": "yes"}},
    }
    found = objects(rendered(values))
    assert not [kind for kind, _ in found if kind == "ScrapeConfig"]
    assert found["ConfigMap", "tidemill"]["data"] == {
        "TIDEMILL_RUN_ID": "mine",
        "RUN_HASH_TAG": "{mine}",
        "TIDEMILL_CONFIG": "/data/c.yaml",
        "TIDEMILL_REDIS_URL": "redis://other:6379/0",
        "EXPORTER_USERNAME": "exporter",
    }
    rollout = found["Deployment", "rollout"]["spec"]
    pod = rollout["template"]["spec"]
    assert rollout["replicas"] == 3 and pod["nodeSelector"] == {"gpu": "yes"}
    assert pod["containers"][0]["image"] == "registry.example/t/rollout:0.2.0"
    assert pod["containers"][0]["resources"] == gpu
    scaled = found["ScaledObject", "reward"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (2, 5)
    assert {t["metadata"]["stream"] for t in scaled["triggers"]} == {"tidemill:{mine}:trajectories"}


def test_the_archive_holds_the_chart(tmp_path: Path) -> None:
    with tarfile.open(pack(tmp_path)) as archive:
        names = set(archive.getnames())
    assert {"tidemill/Chart.yaml", "tidemill/values.yaml", "tidemill/templates/trainer.yaml"} <= names
