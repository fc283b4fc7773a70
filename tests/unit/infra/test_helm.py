"""What values of the Helm chart do, and the archive that it is packed into."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from infra.release.__main__ import pack
from tests.support.chart import VALUES, objects, rendered

HELM = shutil.which("helm")


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


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
