"""docker-compose.yml keeps to its schema and to what operators rely on: scaling, restarts, draining, pins."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from tidemill.common.config.reward import RewardConfig
from tidemill.common.config.run import StreamsConfig
from tidemill.common.process.programs import ROOT

FILE = ROOT / "docker-compose.yml"
OVERRIDES = sorted((ROOT / "infra" / "compose").glob("*.yml"))
"""Files that go on top of it: other nodes, nodes without GPUs."""
EXAMPLE = ROOT / ".env.example"
PROFILES = ("head", "rollout", "reward", "reward-model", "all", "console")
SCALED = ("rollout", "reward", "reward-model")
OURS = (
    "trainer",
    "weights",
    "jobs",
    "rollout",
    "reward",
    "reward-model",
    "console",
    "replay",
    "web",
    "exporter",
)
COMPOSE = shutil.which("docker-compose")
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::[-?]([^}]*))?\}")
CHECKPOINT_S = 60
"""What a trainer is given for its last checkpoint, beyond draining."""


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
    return found


def with_defaults(text: str) -> str:
    return VARIABLE.sub(lambda match: match[2] or "", text)


@pytest.mark.parametrize("path", [FILE, *OVERRIDES], ids=lambda path: path.name)
def test_it_meets_the_schema_of_the_compose_specification(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), get_builtin_schema("vendor.compose-spec"))


def test_the_schema_finds_a_mistake() -> None:
    tree = yaml.safe_load(FILE.read_text())
    tree["services"]["trainer"]["restarts"] = "always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, get_builtin_schema("vendor.compose-spec"))


def merged(base: Any, over: Any) -> Any:
    """Mappings as Compose lays them over each other."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value) for key, value in over.items()}
    return over


@pytest.mark.parametrize("path", OVERRIDES, ids=lambda path: path.stem)
def test_what_goes_on_top_changes_services_that_are_there_and_the_whole_is_valid(path: Path) -> None:
    over = yaml.safe_load(path.read_text())["services"]
    assert set(over) - set(services()) <= {"cpu-base"}
    whole = merged({"services": services()}, {"services": over})
    jsonschema.validate(whole, get_builtin_schema("vendor.compose-spec"))
    for name in set(over) & set(services()):
        assert whole["services"][name]["cap_drop"] == ["ALL"], f"{name} gets more rights"
        if "image" in over[name]:
            assert over[name]["image"].replace("-cpu}", "}") == services()[name]["image"], name


def test_every_service_with_a_gpu_is_without_nvidias_runtime_on_other_nodes() -> None:
    with_gpu = {name for name, service in services().items() if "runtime" in service}
    over = yaml.safe_load((FILE.parent / "infra/compose/cpu.yml").read_text())["services"]
    assert {name for name, service in over.items() if service.get("runtime") == "runc"} == with_gpu


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not on PATH")
@pytest.mark.parametrize("override", [None, *OVERRIDES], ids=lambda path: path.stem if path else "alone")
@pytest.mark.parametrize("profile", PROFILES)
def test_compose_itself_takes_it(profile: str, override: Path | None, tmp_path: Path) -> None:
    command = [
        str(COMPOSE),
        "--env-file",
        str(EXAMPLE),
        "-f",
        str(FILE),
        *(["-f", str(override)] if override else []),
        "--profile",
        profile,
        "config",
        "-q",
    ]
    bases = {"ROCM_TRAINER_BASE": "torch:1", "ROCM_ROLLOUT_BASE": "vllm:1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=os.environ | bases
    )
    assert ended.returncode == 0, ended.stderr


def test_every_service_belongs_to_a_profile_and_all_is_one_machine() -> None:
    profiles = {name: set(service["profiles"]) for name, service in services().items()}
    assert set().union(*profiles.values()) == set(PROFILES)
    for name, found in profiles.items():
        assert ("all" in found) == (bool(found & {"head", "rollout", "reward"})), name


def test_nothing_depends_on_a_service_that_another_node_has() -> None:
    for name, service in services().items():
        assert "depends_on" not in service, name


@pytest.mark.parametrize("name", SCALED)
def test_what_is_scaled_has_no_name_and_no_port_of_its_own(name: str) -> None:
    assert not {"container_name", "ports", "hostname"} & set(services()[name])


def test_images_are_pinned_and_may_be_replaced() -> None:
    for name, service in services().items():
        image = with_defaults(service["image"])
        assert re.fullmatch(r"[a-z0-9./_-]+:[A-Za-z0-9._-]*\d[A-Za-z0-9._-]*", image), (name, image)
        assert "${" in service["image"], name
        base = with_defaults(str(service.get("build", {}).get("args", {}).get("BASE_IMAGE", "x:1")))
        assert re.search(r":.*\d", base) and "latest" not in base, (name, base)


def test_everything_restarts_and_nothing_that_is_done_starts_again() -> None:
    for name, service in services().items():
        policy = service["restart"]
        if name in ("trainer", "rollout", "reward", "reward-model", "jobs", "exporter", "web"):
            assert policy.startswith("on-failure"), name
        else:
            assert policy == ("no" if service["profiles"] == ["console"] else "unless-stopped"), name


def test_logs_are_rotated() -> None:
    for name, service in services().items():
        assert "max-size" in service["logging"]["options"], name
        assert int(service["logging"]["options"]["max-file"]) > 1, name


def test_the_grace_period_fits_draining_and_a_checkpoint() -> None:
    drain_s = max(StreamsConfig().drain_s, RewardConfig().drain_s)
    for name in ("trainer", *SCALED):
        grace = with_defaults(services()[name]["stop_grace_period"])
        assert int(grace.removesuffix("s")) >= drain_s + CHECKPOINT_S, name


def test_our_containers_have_no_rights() -> None:
    for name in OURS:
        service = services()[name]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" not in service and "privileged" not in service, name


def test_every_service_of_ours_has_a_redis_user_of_its_own() -> None:
    users = {name: services()[name]["environment"].get("TIDEMILL_REDIS_USERNAME") for name in OURS}
    assert users == {
        "trainer": "trainer",
        "weights": None,
        "jobs": "jobs",
        "rollout": "rollout",
        "reward": "reward",
        "reward-model": "reward",
        "console": "operator",
        "replay": "operator",
        "web": "operator",
        "exporter": "exporter",
    }


def test_ports_are_served_on_loopback_unless_the_head_is_told_otherwise() -> None:
    for name, service in services().items():
        for port in service.get("ports", []):
            assert with_defaults(port).startswith("127.0.0.1:"), name


def test_secrets_have_no_default() -> None:
    for name, default in VARIABLE.findall(FILE.read_text()):
        if name.endswith(("PASSWORD", "TOKEN", "KEY")):
            assert not default, name


def test_every_variable_is_in_the_example_and_every_line_of_the_example_is_used() -> None:
    used = {name for path in (FILE, *OVERRIDES) for name, _ in VARIABLE.findall(path.read_text())}
    passed_on = {
        name
        for service in services().values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    shown = set(re.findall(r"^#?([A-Z][A-Z_]+)=", EXAMPLE.read_text(), re.MULTILINE))
    assert shown - {"COMPOSE_FILE"} == used | passed_on
