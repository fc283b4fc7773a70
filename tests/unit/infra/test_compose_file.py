"""docker-compose.yml keeps to its schema and to what operators rely on: scaling, restarts, pins, rights."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema.validators import validator_for

from tidemill.common.config.run import StreamsConfig
from tidemill.common.process.programs import ROOT

FILE = ROOT / "docker-compose.yml"
OVERRIDES = sorted((ROOT / "infra" / "compose").glob("*.yml"))
"""Files that go on top of it: other nodes, nodes without GPUs."""
EXAMPLE = ROOT / ".env.example"
PROFILES = ("head", "rollout", "reward", "reward-model", "all", "console")
SCALED = ("rollout", "reward", "reward-model")
USERS = {
    "trainer": "trainer", "weights": None, "rollout": "rollout", "reward": "reward",
    "reward-model": "reward", "console": "operator", "replay": "operator", "web": "operator",
    "exporter": "exporter",
}  # fmt: skip
"""The user of Redis of each service of ours."""
COMPOSE = shutil.which("docker-compose")
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::[-?]([^}]*))?\}")
CHECKPOINT_S = 60
"""What a trainer is given for its last checkpoint, beyond draining."""


SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]


def with_defaults(text: str) -> str:
    return VARIABLE.sub(lambda match: match[2] or "", text)


@pytest.fixture(scope="module")
def specification() -> Any:
    """What says whether a tree is a Compose file. The schema is checked once: that takes longest."""
    schema = get_builtin_schema("vendor.compose-spec")
    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


@pytest.mark.parametrize("path", [FILE, *OVERRIDES], ids=lambda path: path.name)
def test_it_meets_the_schema_of_the_compose_specification(specification: Any, path: Path) -> None:
    specification.validate(yaml.safe_load(path.read_text()))


def merged(base: Any, over: Any) -> Any:
    """Mappings as Compose lays them over each other."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value) for key, value in over.items()}
    return over


@pytest.mark.parametrize("path", OVERRIDES, ids=lambda path: path.stem)
def test_what_goes_on_top_changes_services_that_are_there_and_the_whole_is_valid(
    specification: Any, path: Path
) -> None:
    over = yaml.safe_load(path.read_text())["services"]
    assert set(over) - set(SERVICES) <= {"cpu-base"}
    whole = merged({"services": SERVICES}, {"services": over})
    specification.validate(whole)
    for name in set(over) & set(SERVICES):
        assert whole["services"][name]["cap_drop"] == ["ALL"], f"{name} gets more rights"
        if "image" in over[name]:
            assert over[name]["image"].replace("-cpu}", "}") == SERVICES[name]["image"], name


def test_redis_over_tls_has_all_other_settings_and_everybody_can_read_the_authority() -> None:
    over = yaml.safe_load((FILE.parent / "infra/compose/tls.yml").read_text())["services"]
    command = SERVICES["redis"]["command"]
    assert over["redis"]["command"][: len(command)] == command
    for name, service in SERVICES.items():
        if "TIDEMILL_REDIS_URL" in service.get("environment", {}):
            assert any(":/data:ro" in volume for volume in service["volumes"]), name
    assert SERVICES["redis"]["volumes"][-1]["type"] == "bind", "no empty folder in place of users.acl"


def test_every_service_with_a_gpu_is_without_nvidias_runtime_on_other_nodes() -> None:
    with_gpu = {name for name, service in SERVICES.items() if "runtime" in service}
    over = yaml.safe_load((FILE.parent / "infra/compose/cpu.yml").read_text())["services"]
    assert {name for name, service in over.items() if service.get("runtime") == "runc"} == with_gpu


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not on PATH")
@pytest.mark.parametrize("override", [None, *OVERRIDES], ids=lambda path: path.stem if path else "alone")
def test_compose_itself_takes_it(override: Path | None, tmp_path: Path) -> None:
    """All profiles at once: no service depends on one of another, which a test of their fields sees to."""
    files = [word for path in (FILE, override) if path for word in ("-f", str(path))]
    chosen = [word for profile in PROFILES for word in ("--profile", profile)]
    command = [str(COMPOSE), "--env-file", str(EXAMPLE), *files, *chosen, "config", "-q"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_every_service_belongs_to_a_profile_and_all_is_one_machine() -> None:
    profiles = {name: set(service["profiles"]) for name, service in SERVICES.items()}
    assert set().union(*profiles.values()) == set(PROFILES)
    for name, names in profiles.items():
        assert ("all" in names) == (bool(names & {"head", "rollout", "reward"})), name


@pytest.mark.parametrize("name", ["trainer", "rollout", "reward"])
def test_who_writes_or_reads_trajectories_sees_the_folder_of_runs(name: str) -> None:
    """With `streams.claim_check_bytes` they are files there."""
    assert any(":/runs" in volume for volume in SERVICES[name]["volumes"])


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"console"}))
def test_what_a_profile_starts_it_builds(profile: str) -> None:
    services = [service for service in SERVICES.values() if profile in service["profiles"]]
    ours = {service["image"] for service in services if "TIDEMILL_TAG" in service["image"]}
    assert ours == {service["image"] for service in services if "build" in service}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_bounded_restarted_and_alone(name: str) -> None:
    service = SERVICES[name]
    assert "${" in service["image"], "it may be replaced"
    base = service.get("build", {}).get("args", {}).get("BASE_IMAGE", "x:1")
    for image in (with_defaults(service["image"]), with_defaults(str(base))):
        assert re.fullmatch(r"[a-z0-9./_-]+:[A-Za-z0-9._-]*\d[A-Za-z0-9._-]*", image), image
        assert "latest" not in image
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]
    log = service["logging"]["options"]
    assert "max-size" in log and int(log["max-file"]) > 1
    assert "depends_on" not in service, "another node may have it"
    if name in SCALED:
        assert not {"container_name", "ports", "hostname"} & set(service)
    if name in USERS:
        assert service["read_only"] is True and "user" not in service and "privileged" not in service
        assert service["environment"].get("TIDEMILL_REDIS_USERNAME") == USERS[name]
    if name in ("trainer", *SCALED, "exporter", "web"):
        assert service["restart"].startswith("on-failure"), "what is done does not start again"
    else:
        assert service["restart"] == ("no" if service["profiles"] == ["console"] else "unless-stopped")
    if name in ("trainer", *SCALED):
        grace = with_defaults(service["stop_grace_period"])
        assert int(grace.removesuffix("s")) >= StreamsConfig().drain_s + CHECKPOINT_S


def test_other_nodes_reach_what_they_need_and_no_more() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    for_nodes = {name for name, ports in published.items() for port in ports if "{TIDEMILL_BIND:" in port}
    assert for_nodes == {"redis", "weights"}
    assert all("BIND:-127.0.0.1}" in port for ports in published.values() for port in ports)


@pytest.mark.parametrize(
    ("secret", "holders"),
    [
        ("TIDEMILL_MODEL_TOKEN", {"reward", "reward-model"}),
        ("HF_TOKEN", {"trainer", "rollout", "reward", "reward-model"}),
    ],
)
def test_only_services_that_need_a_token_have_it(secret: str, holders: set[str]) -> None:
    assert {n for n, service in SERVICES.items() if secret in (service.get("environment") or {})} == holders


def test_grafana_does_not_start_without_a_password() -> None:
    parts = SERVICES["grafana"]["entrypoint"]
    assert any("GF_SECURITY_ADMIN_PASSWORD" in word and "exit 1" in word for word in parts)


def test_secrets_have_no_default() -> None:
    for name, default in VARIABLE.findall(FILE.read_text()):
        if name.endswith(("PASSWORD", "TOKEN", "KEY")):
            assert not default, name


def test_every_variable_is_in_the_example_and_every_line_of_the_example_is_used() -> None:
    used = {name for path in (FILE, *OVERRIDES) for name, _ in VARIABLE.findall(path.read_text())}
    passed_on = {
        name
        for service in SERVICES.values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    in_example = set(re.findall(r"^#?([A-Z][A-Z_]+)=", EXAMPLE.read_text(), re.MULTILINE))
    assert in_example - {"COMPOSE_FILE"} == used | passed_on
