"""What docker-compose.yml gives away: as little as each container needs, to as few addresses as can be."""

from typing import Any

import pytest
import yaml

from tidemill.common.process.programs import ROOT

SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_rights_and_limits_of_memory_and_processes(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]


def test_other_nodes_reach_what_they_need_and_no_more() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    for_nodes = {
        name for name, ports in published.items() if any("{TIDEMILL_BIND:" in port for port in ports)
    }
    assert for_nodes == {"redis", "weights"}
    assert all("BIND:-127.0.0.1}" in port for ports in published.values() for port in ports)


def test_servers_of_models_and_who_asks_them_share_a_token() -> None:
    holders = {
        name
        for name, service in SERVICES.items()
        if "TIDEMILL_MODEL_TOKEN" in (service.get("environment") or {})
    }
    assert holders == {"reward", "reward-model"}


def test_who_loads_models_has_the_token_of_their_hub_and_nobody_else() -> None:
    holders = {name for name, service in SERVICES.items() if "HF_TOKEN" in (service.get("environment") or {})}
    assert holders == {"trainer", "rollout", "reward", "reward-model"}


def test_grafana_does_not_start_without_a_password() -> None:
    assert any(
        "GF_SECURITY_ADMIN_PASSWORD" in part and "exit 1" in part
        for part in SERVICES["grafana"]["entrypoint"]
    )
