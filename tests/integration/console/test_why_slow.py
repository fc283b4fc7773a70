"""Why is it slow? Five runs with a planted bottleneck; everything that people look at names it."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import environments, preloaded
from tests.support.prometheus import (
    PROMETHEUS,
    PrometheusServer,
    panel_expressions,
    start_exporter,
    substituted,
)
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import RedisServer, newest_server
from tests.support.slow_redis import DistantRedis
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not newest_server(), reason="no redis-server")

ENOUGH_STEPS = 4
QUICK: dict[str, Any] = {
    "trainer__steps": 5000,
    "rollout__simulated": {"tokens": 8, "vocab_size": 32, "group_s": 0.02},
    "reward__delay_s": (0.02, 0.03),
    "trainer__simulated": {"group_s": 0.01, "update_s": 0.02},
}
"""Everything takes a little."""
PLANTED: dict[str, dict[str, Any]] = {
    "rollout": {
        "rollout__simulated": {"tokens": 8, "vocab_size": 32, "group_s": 0.8},
        "rollout__max_num_seqs": 4,
    },
    "reward": {"reward__delay_s": (0.3, 0.5), "reward__max_in_flight": 2},
    "trainer": {"trainer__simulated": {"group_s": 0.6, "update_s": 0.8}},
    "environment": {
        "rollout__environment": {
            "use": f"{environments.THIS}:Slow",
            "max_turns": 2,
            "processes": 4,
            "options": {"step_s": 0.8},
        },
        "reward__rewards": {"environment": {"environment": True}},
        "reward__function": None,
    },
    "redis": {},
}
"""Some 3 to 6 s of a step: much more than a busy machine takes for the rest."""
FAR_S = 0.08
"""How late each byte from and to Redis is, where that is the bottleneck."""


@pytest.mark.parametrize("stage", PLANTED)
async def test_a_planted_bottleneck_is_named(tmp_path: Path, stage: str) -> None:
    config = simulated_config(tmp_path, **(QUICK | PLANTED[stage]))
    file = tmp_path / "config.yaml"
    file.write_text(config.model_dump_json())
    delay_s = FAR_S if stage == "redis" else 0.0
    with RedisServer(tmp_path / "redis") as server:
        async with (
            DistantRedis(server.port, delay_s) as far,
            ServiceRun(tmp_path, config, url=server.url) as run,
        ):
            for role in ("rollout", "reward", "trainer"):
                run.variables[role] = {"TIDEMILL_REDIS_URL": far.url}
                run.start(role)
            exporter = start_exporter(run) if PROMETHEUS else ""
            await run.reach(ENOUGH_STEPS)
            status, output = await asyncio.gather(
                asyncio.to_thread(tidemill, run, "status", "test"), shown_bottleneck(tmp_path, exporter)
            )
            assert status["bottleneck"]["stage"] == stage, status["bottleneck"]
            assert status["bottleneck"]["text"].lower().startswith(f"{stage} is the bottleneck")
            assert output == (stage if PROMETHEUS else "")


async def shown_bottleneck(folder: Path, exporter: str) -> str:
    """What the dashboard Pipeline says after some seconds; empty where there is no Prometheus to ask."""
    if not PROMETHEUS:
        return ""
    # Started late, so that nothing of the run's own start is in its rates.
    async with PrometheusServer(folder, exporter) as prometheus:
        looked = "sum(count_over_time(tidemill:bottleneck[1m])) >= 6"
        await wait_until(lambda: prometheus.query(looked), awaited="six evaluations of the rules")
        panel = next(item for item in panel_expressions() if item.where.startswith("pipeline: Bottleneck"))
        answers = await prometheus.query(substituted(panel.promql, "20s", "test"))
        return " and ".join(str(series["metric"]["stage"]) for series in answers)


def tidemill(run: ServiceRun, *arguments: str) -> Any:
    environment = os.environ | {"TIDEMILL_REDIS_URL": run.url}
    done = preloaded.tidemill(*arguments, "--json", "--runs-dir", str(run.folder), **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
