"""What must hold on a real engine: one machine with faults, and a second node that knows only the head."""

import ipaddress
import json
import shutil
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.make_env import node_settings, read_settings, write_head
from tests.compose.docker import Docker
from tests.compose.images import Images
from tests.compose.project import Project, wait_for
from tests.support.preloaded import REPO

PATIENCE_S = 900.0
ALONE_STEPS = 5
SLOW_REWARD = """\
import asyncio

from tidemill.services.reward.builtin.gsm8k import compute_score as score


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(2.0)
    return score(data_source, solution_str, ground_truth, extra_info)
"""
"""So slow that a run lasts for some minutes on any machine: there must be time for what is done to it."""
HEAD_SERVICES = (
    "redis", "trainer", "weights", "exporter", "redis-exporter", "prometheus", "web", "grafana",
)  # fmt: skip
PORTS = {
    "REDIS_PORT": "16379", "WEIGHTS_PORT": "18200", "PROMETHEUS_PORT": "19090", "GRAFANA_PORT": "13000",
    "WEB_PORT": "18420",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the test's table."""

    scenario: str
    report: dict[str, Any]
    facts: dict[str, Any]

    @property
    def is_ok(self) -> bool:
        """Whether everything that was expected of the run holds."""
        report = self.report
        return bool(report["ok"]) and report["lost"] == 0 and report["duplicated_in_training"] == 0


def one_machine(docker: Docker, images: Images, work: Path, steps: int) -> Result:
    """A run from `up` to its end; meanwhile rewards are scaled, a container is killed and Redis restarted."""
    node = _head(docker, "tidemill-one", images, work, steps, "127.0.0.1", "all")
    try:
        node.up((*HEAD_SERVICES, "rollout", "reward"))
        _reach(node, 2)
        node.scale("reward", 4)
        wait_for("four reward workers", lambda: _num_alive(node, "reward") >= 4, PATIENCE_S)
        _reach(node, 6)
        rollout = node.kill("rollout")
        wait_for("the killed rollout worker runs again", lambda: node.restarts_of(rollout) > 0, PATIENCE_S)
        reward = node.kill("reward")
        wait_for("the killed reward worker runs again", lambda: node.restarts_of(reward) > 0, PATIENCE_S)
        version = _reach(node, 10)
        docker("restart", "-t", "10", node.containers("redis")[0])
        _reach(node, version + 3)
        if "NOPERM" in node.logs("redis"):
            raise RuntimeError(
                "Redis has dropped transactions of its file, which its user `default` may not do"
            )
        _stop_and_go_on(node)
        node.scale("reward", 1)
        wait_for("one reward worker", lambda: len(node.containers("reward")) == 1, PATIENCE_S)
        version = int(node.status()["version"])
        targets = _scraped(node)
        report = _finish(node)
        facts = {"version_at_last_scaling": version, "scraped": targets, "kills": 2, "redis_restarts": 1}
        return Result("one machine", report, facts)
    except BaseException:
        _show(node, "trainer", "rollout", "reward", "redis")
        raise
    finally:
        node.down()


def _stop_and_go_on(node: Project) -> None:
    """As docs/operations/deploy.md has it: the services first, which need Redis for an orderly end."""
    services = ("trainer", "rollout", "reward")
    version = _reach(node, 1)
    ended = [container for name in services for container in node.containers(name)]
    node.compose("stop", *services)
    codes = [node.inspect(container)["State"]["ExitCode"] for container in ended]
    if any(codes):
        raise RuntimeError(f"stopped services ended with {codes}")
    node.compose("stop")
    node.up((*HEAD_SERVICES, *services))
    _reach(node, version)


def two_nodes(docker: Docker, images: Images, work: Path, steps: int) -> Result:
    """A second node joins over the head's address; it works alone for a while, then beside the head."""
    address = _bridge_address(docker)
    head = _head(docker, "tidemill-head", images, work, steps, address, "all")
    node = None
    try:
        head.up((*HEAD_SERVICES, "rollout", "reward"))
        _reach(head, 2)
        head.compose("stop", "rollout", "reward")
        alone_from = int(head.status()["version"])
        node = _node(docker, images, work, head, address)
        node.up(("rollout", "reward"))
        alone_until = _reach(head, alone_from + ALONE_STEPS)
        head.up(("rollout", "reward"))
        wait_for("rollout workers of both nodes", lambda: _num_alive(head, "rollout") >= 2, PATIENCE_S)
        wait_for("reward workers of both nodes", lambda: _num_alive(head, "reward") >= 2, PATIENCE_S)
        report = _finish(head)
        downloads = node.logs("rollout").count("weights downloaded")
        if not downloads:
            raise RuntimeError("the second node has downloaded no weights: where does it have them from?")
        steps_alone = alone_until - alone_from
        return Result("two nodes", report, {"steps_alone": steps_alone, "versions_downloaded": downloads})
    except BaseException:
        _show(head, "trainer")
        if node is not None:
            _show(node, "rollout", "reward")
        raise
    finally:
        if node is not None:
            node.down()
        head.down()


def _head(
    docker: Docker, name: str, images: Images, work: Path, steps: int, bind: str, *profiles: str
) -> Project:
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_head(folder)
    project = Project(docker, name, folder / ".env", images, *profiles)
    project.set(
        TIDEMILL_RUN_ID=name,
        TIDEMILL_DATA=str(_data(folder, steps)),
        TIDEMILL_SECRETS=str(folder / "secrets"),
        TIDEMILL_BIND=bind,
        **PORTS,
    )
    project.down()  # what an earlier test has left
    return project


def _node(docker: Docker, images: Images, work: Path, head: Project, address: str) -> Project:
    """The .env that make_env.py prints; a network of its own, from which no container of the head is seen."""
    folder = work / "tidemill-node"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = node_settings(head.env_file.parent, address, ["rollout", "reward"]).splitlines()
    own_network = [line for line in lines if not line.startswith(("COMPOSE_FILE=", "TIDEMILL_METRICS_PORT="))]
    (folder / ".env").write_text("\n".join(own_network) + "\n")
    project = Project(docker, "tidemill-node", folder / ".env", images, "rollout", "reward")
    project.down()
    return project


def _data(folder: Path, steps: int) -> Path:
    """A copy of the example with a config for minutes: leases are short, so that takeovers are."""
    data = folder / "data"
    shutil.copytree(REPO / "examples" / "arith", data / "arith")
    path = data / "arith" / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["trainer"] |= {"steps": steps, "groups_per_step": 8, "group_size": 8, "checkpoint_every": 5}
    tree["trainer"]["evaluation"] = {"every": steps // 2, "temperature": 0.0}
    tree["reward"]["function"] = "slow.py:compute_score"
    (data / "arith" / "slow.py").write_text(SLOW_REWARD)
    tree["streams"] = {"lease_s": 5.0, "drain_s": 5.0}
    tree["expect"] = {"eval_gain": 0.1}
    path.write_text(yaml.safe_dump(tree))
    for path in (folder, *folder.rglob("*")):  # containers are another user
        if "secrets" not in path.parts and path.name != ".env":
            path.chmod(0o755 if path.is_dir() else 0o644)
    return data


def _reach(node: Project, version: int) -> int:
    """Wait until the run has done so many steps."""
    wait_for(f"{version} steps", lambda: int(node.status().get("version", 0)) >= version, PATIENCE_S)
    return int(node.status()["version"])


def _num_alive(node: Project, role: str) -> int:
    workers = node.status().get("workers", [])
    return sum(worker["is_alive"] and worker["role"] == role for worker in workers)


def _finish(node: Project) -> dict[str, Any]:
    """Wait for the trainer to end by itself, and ask the console what the run came to."""
    wait_for("the trainer has ended", lambda: not node.containers("trainer"), PATIENCE_S)
    trainer = node.docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={node.name}",
                          "--filter", "label=com.docker.compose.service=trainer").split()[0]  # fmt: skip
    if code := node.inspect(trainer)["State"]["ExitCode"]:
        raise RuntimeError(f"the trainer ended with {code}")
    report: dict[str, Any] = json.loads(node.console("status", "--report", "--json"))
    return report


def _scraped(node: Project) -> int:
    """Processes of the run that Prometheus has found by itself and reads."""
    port = read_settings(node.env_file.read_text())["PROMETHEUS_PORT"]

    def up() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=30) as answer:
            targets = json.load(answer)["data"]["activeTargets"]
        scraped = [target for target in targets if target["labels"]["job"] == "tidemill"]
        return len(scraped) if scraped and all(target["health"] == "up" for target in scraped) else 0

    return wait_for("Prometheus reads every process of the run", up, PATIENCE_S)


def _bridge_address(docker: Docker) -> str:
    """An address of this machine that containers of every network reach: all that the nodes share."""
    config = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]
    first = next(ipaddress.ip_network(config["Subnet"]).hosts())
    return str(config.get("Gateway") or first)  # older engines do not say which one they have taken


def _show(node: Project, *services: str) -> None:
    for service in services:
        print(f"--- {node.name} {service}\n{node.logs(service)[-3000:]}", flush=True)
