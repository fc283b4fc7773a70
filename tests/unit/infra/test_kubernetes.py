"""The manifests of infra/kubernetes: valid, consistent with each other, and with what the services need.

There is no kustomize here: the files are read as it would read them.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tidemill.common.config import RunConfig
from tidemill.common.config.run import StreamsConfig
from tidemill.common.process import service
from tidemill.common.process.programs import ROOT, Program
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.services.console.exporter import __main__ as exporter
from tidemill.services.console.launch.local_run import GRACE_MARGIN_S

FOLDER = ROOT / "infra" / "kubernetes"
COMPONENTS = ("keda", "monitoring", "reward-model")
SCHEMAS = [json.loads(path.read_text()) for path in (ROOT / "tests/data/kubernetes").glob("*.json")]
PODS = ("Deployment", "StatefulSet", "Job")
Object = dict[str, Any]


def read(path: Path) -> list[Object]:
    return [tree for tree in yaml.safe_load_all(path.read_text(encoding="utf-8")) if tree]


def kustomization(folder: Path) -> Object:
    (tree,) = read(folder / "kustomization.yaml")
    return tree


def variables_of(generator: Object, folder: Path) -> dict[str, str]:
    lines = list(generator.get("literals", []))
    for name in generator.get("envs", []):
        lines += (folder / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


FOLDERS = [FOLDER / "base", *(FOLDER / name for name in COMPONENTS)]
CONFIG_MAPS = {
    generator["name"]: variables_of(generator, folder)
    for folder in FOLDERS
    for generator in kustomization(folder).get("configMapGenerator", [])
}
OBJECTS = [
    (f"{folder.name}/{name}", tree)
    for folder in FOLDERS
    for name in kustomization(folder)["resources"]
    for tree in read(folder / name)
]
NAMES = {(tree["kind"], tree["metadata"]["name"]) for _, tree in OBJECTS}


def templates() -> Iterator[tuple[str, Object]]:
    """Each pod template, by the name of what owns it."""
    for _, tree in OBJECTS:
        if tree["kind"] in PODS:
            yield tree["metadata"]["name"], tree["spec"]["template"]


TEMPLATES = dict(templates())
CONTAINERS = {name: template["spec"]["containers"][0] for name, template in TEMPLATES.items()}
OWN = sorted(set(CONTAINERS) - {"redis"})


def schema_of(kind: str) -> Object:
    (found,) = [schema for schema in SCHEMAS if kind in schema["kinds"]]
    return {"$defs": found["$defs"], "$ref": found["kinds"][kind]}


@pytest.mark.parametrize(("where", "tree"), OBJECTS, ids=[f"{w}-{t['kind']}" for w, t in OBJECTS])
def test_every_object_fits_the_strict_schema_of_its_kind(where: str, tree: Object) -> None:
    errors = Draft202012Validator(schema_of(tree["kind"])).iter_errors(tree)
    assert [f"{where}: {error.json_path}: {error.message}" for error in errors] == []


@pytest.mark.parametrize(("kind", "path"), [("Deployment", "replicaz"), ("ScaledObject", "trigger")])
def test_the_schemas_refuse_what_they_do_not_know(kind: str, path: str) -> None:
    tree = next(tree for _, tree in OBJECTS if tree["kind"] == kind)
    wrong = tree | {"spec": tree["spec"] | {path: 1}}
    assert not Draft202012Validator(schema_of(kind)).is_valid(wrong)


def test_every_file_is_part_of_a_kustomization_and_none_is_missing() -> None:
    named = {FOLDER / "kustomization.yaml"}
    for folder in FOLDERS:
        tree = kustomization(folder)
        files = [*tree["resources"], "kustomization.yaml"]
        files += [
            env for generator in tree.get("configMapGenerator", []) for env in generator.get("envs", [])
        ]
        named |= {folder / name for name in files}
    assert {path for path in FOLDER.rglob("*") if path.is_file() and path.name != "README.md"} == named
    whole = kustomization(FOLDER)
    assert whole["resources"] == ["base"] and set(whole["components"]) <= set(COMPONENTS)


def test_images_are_named_with_the_release_of_this_repository() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    named = {image["name"]: image["newTag"] for image in kustomization(FOLDER)["images"]}
    assert named == {CONTAINERS[name]["image"]: version for name in OWN}


def keys_of_secrets() -> dict[str, set[str]]:
    """What the README has people make."""
    users = (ROOT / "infra/redis/users.acl").read_text()
    passwords = {f"{name.upper()}_PASSWORD" for name in re.findall(r"^user (\w+) on", users, re.MULTILINE)}
    return {
        "tidemill-passwords": passwords,
        "tidemill-redis-users": {"users.acl"},
        "tidemill-keys": {"JUDGE_API_KEY", "TIDEMILL_MODEL_TOKEN"},
    }


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_pod_refers_only_to_what_is_there(name: str) -> None:
    template, container, secrets = TEMPLATES[name], CONTAINERS[name], keys_of_secrets()
    for source in container.get("envFrom", []):
        assert source["configMapRef"]["name"] in CONFIG_MAPS
    for variable in container.get("env", []):
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            assert reference["key"] in secrets[reference["name"]]
    volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
    owner = next(t for _, t in OBJECTS if t["kind"] in PODS and t["metadata"]["name"] == name)
    claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes) | claims
    for volume in volumes.values():
        if claim := volume.get("persistentVolumeClaim"):
            assert ("PersistentVolumeClaim", claim["claimName"]) in NAMES
        if secret := volume.get("secret"):
            assert secret["secretName"] in secrets
    known = {v["name"] for v in container.get("env", [])}
    for source in container.get("envFrom", []):
        known |= set(CONFIG_MAPS[source["configMapRef"]["name"]])
    used = re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))
    assert set(used) <= known
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if http := container.get(probe, {}).get("httpGet"):
            assert http["port"] in ports and http["path"] == "/healthz"


def test_selectors_find_their_pods() -> None:
    for _, tree in OBJECTS:
        if tree["kind"] in ("Deployment", "StatefulSet"):
            labels = tree["spec"]["template"]["metadata"]["labels"]
            assert tree["spec"]["selector"]["matchLabels"].items() <= labels.items()
        if tree["kind"] == "Service":
            selector = tree["spec"]["selector"].items()
            (found,) = [n for n, t in TEMPLATES.items() if selector <= t["metadata"]["labels"].items()]
            ports = {port["name"] for port in CONTAINERS[found]["ports"]}
            assert {port["name"] for port in tree["spec"]["ports"]} <= ports


@pytest.mark.parametrize("name", CONTAINERS)
def test_pods_run_without_root_or_rights_and_write_to_volumes_only(name: str) -> None:
    pod, container = TEMPLATES[name]["spec"], CONTAINERS[name]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", OWN)
def test_the_user_is_that_of_the_image(name: str) -> None:
    service_of = {"exporter": "console", "reward-model": "reward/model_server"}
    dockerfile = ROOT / "services" / service_of.get(name, name) / "Dockerfile"
    (user,) = re.findall(r"^USER (\d+):(\d+)$", dockerfile.read_text(), re.MULTILINE)
    context = TEMPLATES[name]["spec"]["securityContext"]
    assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user


@pytest.mark.parametrize("name", ["trainer", "rollout", "reward", "reward-model"])
def test_a_pod_has_the_time_to_drain(name: str) -> None:
    reward: Any = RunConfig.model_fields["reward"].default
    longest_s = max(StreamsConfig().drain_s, reward.drain_s)
    assert TEMPLATES[name]["spec"]["terminationGracePeriodSeconds"] >= longest_s + GRACE_MARGIN_S


def test_services_understand_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    known = service._parser("rollout", Program.ROLLOUT, "")
    assert known.parse_args(filled("rollout")).run == known.parse_args(filled("reward")).run == "arith-1"
    assert exporter._parser().parse_args(filled("exporter")).run_id == "arith-1"
    assert filled("trainer") == ["--run", "arith-1", "--config", "/data/arith/config.yaml"]


def filled(name: str) -> list[str]:
    container = CONTAINERS[name]
    values = {key: value for source in CONFIG_MAPS.values() for key, value in source.items()}
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], part) for part in container["args"]]


def test_redis_has_the_settings_of_infra_redis() -> None:
    arguments = CONTAINERS["redis"]["args"][1:]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    lines = (ROOT / "infra/redis/redis.conf").read_text().splitlines()
    wanted = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert {f"--{name}": value.strip('"') for name, value in wanted.items()}.items() <= given.items()


def test_only_services_of_the_run_reach_redis() -> None:
    (policy,) = [tree["spec"] for _, tree in OBJECTS if tree["kind"] == "NetworkPolicy"]
    assert policy["podSelector"]["matchLabels"].items() <= TEMPLATES["redis"]["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    (expression,) = rule["from"][0]["podSelector"]["matchExpressions"]
    names = {t["metadata"]["labels"]["app.kubernetes.io/name"] for t in TEMPLATES.values()}
    assert set(expression["values"]) == names - {"redis", "reward-model"}
    assert [port["port"] for port in rule["ports"]] == [6379]


class TestScaling:
    """As kustomize and KEDA would have it."""

    @pytest.fixture
    def spec(self) -> Object:
        return next(tree for _, tree in OBJECTS if tree["kind"] == "ScaledObject")["spec"]

    def test_the_stream_is_that_of_the_run(self, spec: Object) -> None:
        (replacement,) = kustomization(FOLDER / "keda")["replacements"]
        source, (target,) = replacement["source"], replacement["targets"]
        value = CONFIG_MAPS[source["name"]][source["fieldPath"].removeprefix("data.")]
        assert target["fieldPaths"] == ["spec.triggers.*.metadata.stream"]
        run_id = CONFIG_MAPS["tidemill"]["TIDEMILL_RUN_ID"]
        for trigger in spec["triggers"]:
            parts = trigger["metadata"]["stream"].split(target["options"]["delimiter"])
            parts[target["options"]["index"]] = value
            assert ":".join(parts) == Keys(run_id).trajectories()
            assert trigger["metadata"]["consumerGroup"] == REWARD_GROUP

    def test_what_is_scaled_has_no_number_of_its_own(self, spec: Object) -> None:
        target = spec["scaleTargetRef"]["name"]
        assert ("Deployment", target) in NAMES
        (tree,) = [t for _, t in OBJECTS if (t["kind"], t["metadata"]["name"]) == ("Deployment", target)]
        assert "replicas" not in tree["spec"], "every apply would set the number back"

    def test_targets_fit_the_slots_of_a_worker(self, spec: Object) -> None:
        reward: Any = RunConfig.model_fields["reward"].default
        by_name = {trigger["name"]: trigger["metadata"] for trigger in spec["triggers"]}
        assert int(by_name["lag"]["lagCount"]) == reward.max_in_flight // 2
        assert 0.8 * reward.max_in_flight < int(by_name["held"]["pendingEntriesCount"]) < reward.max_in_flight

    def test_keda_asks_as_a_user_that_may(self, spec: Object) -> None:
        (authentication,) = [tree for _, tree in OBJECTS if tree["kind"] == "TriggerAuthentication"]
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
    (tree,) = [tree for _, tree in OBJECTS if tree["kind"] == "ScrapeConfig"]
    (discovery,) = tree["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"http://exporter.{kustomization(FOLDER)['namespace']}:9109/sd"
    assert ("Service", "exporter") in NAMES
