"""The Helm chart: valid objects, consistent with each other, with what the services need, and with its
values."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from pydantic import TypeAdapter

from infra.release.__main__ import pack
from tests.support.chart import EVERYTHING, VALUES, objects, rendered
from tidemill.common.config import RunConfig
from tidemill.common.config.run import StreamsConfig
from tidemill.common.process import service
from tidemill.common.process.programs import ROOT, Program
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.services.console import exporter
from tidemill.services.console.up.local_run import GRACE_MARGIN_S

PODS = ("Deployment", "StatefulSet", "Job")
Object = dict[str, Any]
OBJECTS: dict[tuple[str, str], Object] = objects(rendered(EVERYTHING))
CONFIG_MAPS = {name: tree["data"] for (kind, name), tree in OBJECTS.items() if kind == "ConfigMap"}
TEMPLATES = {name: tree["spec"]["template"] for (kind, name), tree in OBJECTS.items() if kind in PODS}
CONTAINERS = {name: template["spec"]["containers"][0] for name, template in TEMPLATES.items()}
OWN = sorted(set(CONTAINERS) - {"redis"})
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

POSITIVE = "[1-9][0-9]*"
COUNT = "[0-9]+"
DURATION = "[0-9]+(s|m)"
SCALES = {"type": "(Pods|Percent)", "value": POSITIVE, "periodSeconds": POSITIVE}
BEHAVIOR = "advanced.horizontalPodAutoscalerConfig.behavior"
CUSTOM: dict[tuple[str, str], dict[str, str]] = {
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef.name": ".+",
        "minReplicaCount": COUNT,
        "maxReplicaCount": POSITIVE,
        "pollingInterval": POSITIVE,
        "fallback.failureThreshold": POSITIVE,
        "fallback.replicas": COUNT,
        **{
            f"{BEHAVIOR}.{way}.policies.{n}": v for way in ("scaleUp", "scaleDown") for n, v in SCALES.items()
        },
        f"{BEHAVIOR}.scaleDown.stabilizationWindowSeconds": COUNT,
        "triggers.type": "redis-streams",
        "triggers.name": ".+",
        "triggers.metadata.address": "[^:]+:[0-9]+",
        "triggers.metadata.stream": ".+",
        "triggers.metadata.consumerGroup": ".+",
        **{
            f"triggers.metadata.{name}": "'[0-9]+'"
            for name in ("databaseIndex", "lagCount", "activationLagCount", "pendingEntriesCount")
        },  # KEDA refuses a lag without `activationLagCount`
        "triggers.authenticationRef.name": ".+",
    },
    ("keda.sh/v1alpha1", "TriggerAuthentication"): {
        f"{source}.{name}": "username|password" if name == "parameter" else ".+"
        for source in ("secretTargetRef", "configMapTargetRef")
        for name in ("parameter", "name", "key")
    },
    ("monitoring.coreos.com/v1alpha1", "ScrapeConfig"): {
        "honorLabels": "True|False",
        "scrapeInterval": DURATION,
        "scrapeTimeout": DURATION,
        "httpSDConfigs.url": "https?://.+",
        "httpSDConfigs.refreshInterval": DURATION,
    },
}
"""Fields of specs that the chart uses, from the definitions of KEDA and the Prometheus operator, and what
their values look like; a number that has to be text stands in quotation marks."""


def leaves(tree: Any, path: str = "") -> list[tuple[str, str]]:
    """Each value by the names that lead to it; those of a list have one path."""
    if isinstance(tree, dict):
        return [leaf for name, value in tree.items() for leaf in leaves(value, f"{path}.{name}".strip("."))]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value, path)]
    return [(path, f"'{tree}'" if isinstance(tree, str) and tree.isdigit() else str(tree))]


# lightkube-models is made from Kubernetes' own definitions. It belongs to the client lightkube, and takes
# these three from there; an alias is a field such as `from`, which Python cannot name so.
TAKEN = {
    "dataclass": dataclasses.dataclass,
    "field": lambda metadata, default=None: dataclasses.field(
        default=default, metadata={"alias": metadata["json"]}
    ),
    "DictMixin": object,
}


@cache
def kind_of(api_version: str, kind: str) -> TypeAdapter[Any]:
    """What an object of a kind of Kubernetes itself must be, strictly: any other field is an error."""
    sys.modules.setdefault("lightkube.core.schema", SimpleNamespace(**TAKEN))  # type: ignore[arg-type]
    group, _, version = api_version.rpartition("/")
    models = import_module(f"lightkube.models.{group.partition('.')[0] or 'core'}_{version}")
    model = getattr(models, kind)
    model.__pydantic_config__ = {"extra": "forbid", "strict": True}
    return TypeAdapter(model)


def only(kind: str) -> Object:
    (tree,) = [tree for (its_kind, _), tree in OBJECTS.items() if its_kind == kind]
    return tree


@pytest.mark.parametrize("key", [key for key in OBJECTS if key[0] != "ConfigMap"], ids="-".join)
def test_every_object_fits_the_strict_schema_of_its_kind(key: tuple[str, str]) -> None:
    tree = OBJECTS[key]
    kind = tree["apiVersion"], tree["kind"]
    assert tree["metadata"]["namespace"] == "tidemill"
    if kind not in CUSTOM:
        kind_of(*kind).validate_json(json.dumps(tree))
        return
    assert set(tree) == {"apiVersion", "kind", "metadata", "spec"}
    leaves_of_spec = leaves(tree["spec"])
    assert {path for path, _ in leaves_of_spec} == set(CUSTOM[kind])
    assert [leaf for leaf in leaves_of_spec if not re.fullmatch(CUSTOM[kind][leaf[0]], leaf[1])] == []


def keys_of_secrets() -> dict[str, set[str]]:
    """What docs/operations/deploy.md has people make."""
    users = (ROOT / "infra/redis/users.acl").read_text()
    passwords = {f"{name.upper()}_PASSWORD" for name in re.findall(r"^user (\w+) on", users, re.MULTILINE)}
    return {
        "tidemill-passwords": passwords,
        "tidemill-redis-users": {"users.acl"},
        "tidemill-keys": {"JUDGE_API_KEY", "TIDEMILL_MODEL_TOKEN"},
    }


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_pod_refers_only_to_what_is_there(name: str) -> None:
    template = TEMPLATES[name]
    container = CONTAINERS[name]
    secrets = keys_of_secrets()
    for source in container.get("envFrom", []):
        assert source["configMapRef"]["name"] in CONFIG_MAPS
    for variable in container.get("env", []):
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            assert reference["key"] in secrets[reference["name"]]
    volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
    owner = next(tree for (kind, its_name), tree in OBJECTS.items() if kind in PODS and its_name == name)
    claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes) | claims
    for volume in volumes.values():
        if claim := volume.get("persistentVolumeClaim"):
            assert ("PersistentVolumeClaim", claim["claimName"]) in OBJECTS
        if secret := volume.get("secret"):
            assert secret["secretName"] in secrets
    variables = {v["name"] for v in container.get("env", [])}
    for source in container.get("envFrom", []):
        variables |= set(CONFIG_MAPS[source["configMapRef"]["name"]])
        assert all(isinstance(value, str) for value in CONFIG_MAPS[source["configMapRef"]["name"]].values())
    used = re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))
    assert set(used) <= variables
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if http := container.get(probe, {}).get("httpGet"):
            assert http["port"] in ports and http["path"] == "/healthz"


@pytest.mark.parametrize("name", ["trainer", "rollout", "reward"])
def test_who_writes_or_reads_trajectories_sees_the_folder_of_runs(name: str) -> None:
    """With `streams.claim_check_bytes` they are files there."""
    assert "/runs" in [mount["mountPath"] for mount in CONTAINERS[name]["volumeMounts"]]


def test_selectors_find_their_pods() -> None:
    for tree in OBJECTS.values():
        if tree["kind"] in ("Deployment", "StatefulSet"):
            labels = tree["spec"]["template"]["metadata"]["labels"]
            assert tree["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if tree["kind"] == "Service":
            selector = tree["spec"]["selector"].items()
            (target,) = [n for n, t in TEMPLATES.items() if selector <= t["metadata"]["labels"].items()]
            ports = {port["name"] for port in CONTAINERS[target]["ports"]}
            assert {port["name"] for port in tree["spec"]["ports"]} <= ports


@pytest.mark.parametrize("name", CONTAINERS)
def test_pods_run_without_rights_as_the_user_of_their_image_and_have_the_time_to_drain(name: str) -> None:
    pod = TEMPLATES[name]["spec"]
    container = CONTAINERS[name]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    if name in OWN:
        assert container["image"].partition(":")[2] == VERSION
        service_of = {"exporter": "console", "reward-model": "reward/model_server"}
        dockerfile = ROOT / "services" / service_of.get(name, name) / "Dockerfile"
        user = re.findall(r"^USER (\d+):(\d+)$", dockerfile.read_text(), re.MULTILINE)
        ids = pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]
        assert user == [tuple(map(str, ids))]
    if name in ("trainer", "rollout", "reward", "reward-model"):
        assert pod["terminationGracePeriodSeconds"] >= StreamsConfig().drain_s + GRACE_MARGIN_S


def test_services_understand_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = service._parser("rollout", Program.ROLLOUT, "")
    assert parser.parse_args(filled("rollout")).run == parser.parse_args(filled("reward")).run == "arith-1"
    command = typer.main.get_command(exporter.app)
    assert command.make_context("exporter", filled("exporter")).params["run_id"] == "arith-1"
    assert filled("trainer") == ["--run", "arith-1", "--config", "/data/arith/config.yaml"]


def filled(name: str) -> list[str]:
    container = CONTAINERS[name]
    values = {key: value for source in CONFIG_MAPS.values() for key, value in source.items()}
    return [
        re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], argument) for argument in container["args"]
    ]


def test_redis_has_the_settings_of_infra_redis() -> None:
    arguments = CONTAINERS["redis"]["args"][1:]
    settings = dict(zip(arguments[::2], arguments[1::2], strict=True))
    lines = (ROOT / "infra/redis/redis.conf").read_text().splitlines()
    wanted = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert {f"--{name}": value.strip('"') for name, value in wanted.items()}.items() <= settings.items()


def test_only_services_of_the_run_reach_redis() -> None:
    policy = only("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= TEMPLATES["redis"]["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    (expression,) = rule["from"][0]["podSelector"]["matchExpressions"]
    names = {t["metadata"]["labels"]["app.kubernetes.io/name"] for t in TEMPLATES.values()}
    assert set(expression["values"]) == names - {"redis"}
    assert [port["port"] for port in rule["ports"]] == [6379]


class TestScaling:
    """As KEDA would have it."""

    @pytest.fixture
    def spec(self) -> Object:
        scaled: Object = only("ScaledObject")["spec"]
        return scaled

    def test_the_stream_is_that_of_the_run_and_decides_alone(self, spec: Object) -> None:
        run_id = VALUES["run"]["id"]
        for trigger in spec["triggers"]:
            assert trigger["metadata"]["stream"] == Keys(run_id).trajectories()
            assert trigger["metadata"]["consumerGroup"] == REWARD_GROUP
        tree = OBJECTS["Deployment", spec["scaleTargetRef"]["name"]]
        assert "replicas" not in tree["spec"], "every apply would set the number back"

    def test_targets_fit_the_slots_of_a_worker(self, spec: Object) -> None:
        reward: Any = RunConfig.model_fields["reward"].default
        by_name = {trigger["name"]: trigger["metadata"] for trigger in spec["triggers"]}
        assert int(by_name["lag"]["lagCount"]) == reward.max_in_flight // 2
        assert 0.8 * reward.max_in_flight < int(by_name["held"]["pendingEntriesCount"]) < reward.max_in_flight

    def test_keda_asks_as_a_user_that_may(self, spec: Object) -> None:
        authentication = only("TriggerAuthentication")
        references = {t["authenticationRef"]["name"] for t in spec["triggers"]}
        assert references == {authentication["metadata"]["name"]}
        (username,) = authentication["spec"]["configMapTargetRef"]
        (password,) = authentication["spec"]["secretTargetRef"]
        user = CONFIG_MAPS[username["name"]][username["key"]]
        assert password["key"] == f"{user.upper()}_PASSWORD" in keys_of_secrets()[password["name"]]
        rules = re.search(
            rf"^user {user} on (.*)$", (ROOT / "infra/redis/users.acl").read_text(), re.MULTILINE
        )
        assert rules and {"+ping", "+xinfo|groups", "+xpending"} <= set(re.findall(r"\+[\w|]+", rules[1]))


def test_prometheus_discovers_through_the_exporter() -> None:
    (discovery,) = only("ScrapeConfig")["spec"]["httpSDConfigs"]
    assert discovery["url"] == "http://exporter.tidemill:9109/sd"
    assert ("Service", "exporter") in OBJECTS


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
    trees = objects(rendered(values))
    assert not [kind for kind, _ in trees if kind == "ScrapeConfig"]
    assert trees["ConfigMap", "tidemill"]["data"] == {
        "TIDEMILL_RUN_ID": "mine", "RUN_HASH_TAG": "{mine}", "TIDEMILL_CONFIG": "/data/c.yaml",
        "TIDEMILL_REDIS_URL": "redis://other:6379/0", "EXPORTER_USERNAME": "exporter",
    }  # fmt: skip
    rollout = trees["Deployment", "rollout"]["spec"]
    pod = rollout["template"]["spec"]
    assert rollout["replicas"] == 3 and pod["nodeSelector"] == {"gpu": "yes"}
    assert pod["containers"][0]["image"] == "registry.example/t/rollout:0.2.0"
    assert pod["containers"][0]["resources"] == gpu
    scaled = trees["ScaledObject", "reward"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (2, 5)
    assert {t["metadata"]["stream"] for t in scaled["triggers"]} == {"tidemill:{mine}:trajectories"}


def test_the_archive_holds_the_chart(tmp_path: Path) -> None:
    with tarfile.open(pack(tmp_path)) as archive:
        names = set(archive.getnames())
    assert {"tidemill/Chart.yaml", "tidemill/values.yaml", "tidemill/templates/trainer.yaml"} <= names
