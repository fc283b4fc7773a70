"""The exporter beside real services: what it exports, and that its targets can be scraped."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.preloaded import start_module
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import free_port
from tests.support.waiting import wait_until

STEPS = 1000
"""More than a test waits for."""


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of an exposition; a family or sample that comes twice is an error."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    names = set()
    for family in text_string_to_metric_families(text):
        assert family.name not in names, family.name
        names.add(family.name)
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, key
            samples[key] = sample.value
    return samples


def sample(text: str, name: str, **labels: str) -> float | None:
    return samples(text).get((name, frozenset(labels.items())))


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Any]:
    """Starts an exporter; gives its address."""
    processes = []

    def start(run: ServiceRun, **variables: str) -> str:
        port = free_port()
        words = [run.keys.run_id, "--port", str(port), "--every", "0.5"]
        env = os.environ | {"TIDEMILL_REDIS_URL": run.url} | variables
        processes.append(
            start_module("tidemill.services.console.exporter", words, tmp_path / "exporter.log", env)
        )
        return f"http://127.0.0.1:{port}"

    yield start
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


def is_up(address: str) -> bool:
    try:
        return bool(sample(fetch(f"{address}/metrics"), "tidemill_redis_up"))
    except OSError:
        return False


def targets(address: str) -> dict[str, str]:
    """Address of each target by its worker's name."""
    targets = json.loads(fetch(f"{address}/sd"))
    return {item["labels"].get("worker", item["labels"]["service"]): item["targets"][0] for item in targets}


async def test_every_process_of_a_run_is_discovered_and_scraped_and_an_outage_is_outlived(tmp_path, exporter):
    config = simulated_config(tmp_path, trainer__steps=STEPS, streams__trim=True)
    async with ServiceRun(tmp_path, config) as run:
        address = exporter(run)
        for role in ("trainer", "rollout", "reward"):
            run.start(role)
        wanted = {"exporter", "trainer", "rollout", "reward"}
        await wait_until(lambda: is_up(address) and set(targets(address)) == wanted)
        await wait_until(lambda: (sample(fetch(f"{address}/metrics"), "tidemill_run_version") or 0) > 1)
        pages = {name: fetch(f"http://{target}/metrics") for name, target in targets(address).items()}
        info = {
            name: sample(page, "tidemill_run_info", run_id="test", role=name) for name, page in pages.items()
        }
        assert info == dict.fromkeys(wanted, 1.0)
        assert sample(pages["exporter"], "tidemill_workers", role="rollout", state="alive") == 1
        assert sample(pages["exporter"], "tidemill_run_steps") == STEPS
        assert sample(pages["trainer"], "tidemill_stage_seconds_count", stage="trainer") > 0
        # A second worker appears by itself, and one that leaves is gone.
        run.start("reward", "reward-1")
        await wait_until(lambda: "reward-1" in targets(address))
        assert await run.stop("reward-1") == 0
        await wait_until(lambda: "reward-1" not in targets(address))
        run.redis.kill()
        await wait_until(lambda: not is_up(address))
        assert "rollout" in targets(address), "the last known targets stand while Redis is away"
        run.redis.start()
        await wait_until(lambda: is_up(address))
