"""Services that start in any order, late, or on their own; and a run's only trainer."""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from tests.support.servers import RedisServer
from tests.support.trajectories import make_config
from tests.support.waiting import wait_until
from tidemill.common.errors import BrokerError, ConfigError, UnreachableError
from tidemill.common.process import run_watch, service
from tidemill.common.process.heartbeats import GONE_AFTER_S, Heartbeat, check_sole_trainer, publish_heartbeat
from tidemill.common.redis import broker as broker_module
from tidemill.common.run.state import (
    FINISHED,
    has_finished,
    publish_config,
    read_config,
    register_config,
    update_state,
)

CONFIG = make_config(trainer={"steps": 3})


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"config": None, "run": "r", "set": []} | values)


async def find(role: str, broker: Any, keys: Any, **values: Any) -> Any:
    return await asyncio.wait_for(service._find_config(role, broker, keys, options(**values)), 120)


async def test_a_worker_waits_for_its_run_and_says_so(broker, keys, monkeypatch):
    monkeypatch.setattr(service, "FIRST_RUN_PAUSE_S", 0.05)
    with capture_logs() as lines:
        finding = asyncio.ensure_future(find("rollout", broker, keys))
        await wait_until(lambda: lines)
        await publish_config(broker, keys, CONFIG)
        assert await finding == CONFIG
    assert lines[0]["event"] == "waiting for the run to appear"
    assert "has no run" in lines[0]["reason"]


@pytest.mark.parametrize(("role", "wait_s"), [("rollout", "0"), ("trainer", None)])
async def test_nobody_waits_for_ever(broker, keys, monkeypatch, role, wait_s):
    if wait_s is not None:
        monkeypatch.setenv(service.RUN_WAIT_VARIABLE, wait_s)
    with pytest.raises(ConfigError, match="has no run"):
        await find(role, broker, keys)


class TestRegistering:
    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(CONFIG.model_dump(mode="json")))
        return path

    async def test_a_trainer_makes_the_run_known_and_finds_it_when_it_is_started_again(
        self, broker, keys, file
    ):
        config = await find("trainer", broker, keys, config=file)
        assert config.run_id == keys.run_id
        assert await read_config(broker, keys) == config
        assert await find("trainer", broker, keys, config=file) == config

    async def test_epochs_are_steps_before_anyone_else_sees_the_run(self, broker, keys, tmp_path):
        (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "ground_truth": 1}\n' * 7)
        tree = make_config().model_dump(mode="json", exclude_unset=True)
        tree["data"]["train"] = str(tmp_path / "rows.jsonl")
        tree["trainer"] = {"epochs": 2, "groups_per_step": 3, "group_size": 2}
        (tmp_path / "epochs.yaml").write_text(yaml.safe_dump(tree))
        for _ in range(2):
            await find("trainer", broker, keys, config=tmp_path / "epochs.yaml")
            recorded = (await read_config(broker, keys)).trainer
            assert (recorded.steps, recorded.epochs) == (4, 2.0)  # 7 // 3 * 2

    async def test_another_config_is_refused_by_field(self, broker, keys, file):
        await publish_config(broker, keys, make_config(trainer={"steps": 9}))
        with pytest.raises(ConfigError, match=r"another config: trainer\.steps: 9 -> 3"):
            await find("trainer", broker, keys, config=file)

    async def test_of_two_at_once_one_registers(self, broker, keys):
        changed = make_config(trainer={"steps": 4})
        results = await asyncio.gather(
            *(register_config(broker, keys, config) for config in (CONFIG, changed)), return_exceptions=True
        )
        assert sorted(isinstance(result, ConfigError) for result in results) == [False, True]


async def test_a_run_is_finished_when_it_has_done_its_steps_and_said_so(broker, keys):
    assert not await has_finished(broker, keys, 3)
    await update_state(broker, keys, status="running", version=3)
    assert not await has_finished(broker, keys, 3)
    await update_state(broker, keys, status=FINISHED)
    assert await has_finished(broker, keys, 3)
    assert not await has_finished(broker, keys, 4), "the run goes on with more steps"


@pytest.mark.parametrize("role", ["rollout", "reward"])
async def test_a_worker_that_comes_too_late_has_nothing_to_do(broker, keys, redis_server, monkeypatch, role):
    await publish_config(broker, keys, CONFIG)
    await update_state(broker, keys, status=FINISHED, version=3)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)

    def load():
        raise AssertionError("nothing heavy is imported")

    late = argparse.Namespace(run=keys.run_id, name="late", set=[], config=None, metrics_port=0)
    with capture_logs() as lines:
        assert await service._serve(role, late, load) == 0
    assert lines[-1]["event"] == "the run is finished: nothing is left to do"


@pytest.mark.parametrize("role", ["rollout", "reward", "replica", "sandbox"])
async def test_a_worker_says_when_it_joins_and_leaves_when_the_run_is_finished(
    broker, keys, redis_server, monkeypatch, role
):
    await publish_config(broker, keys, CONFIG)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    monkeypatch.setattr(run_watch, "LOOK_S", 0.01)

    async def serve(context):
        await update_state(broker, keys, status=FINISHED, version=3)
        await context.stopping.wait()

    worker = argparse.Namespace(run=keys.run_id, name="w", set=[], config=None, metrics_port=0)
    with capture_logs() as lines:
        assert await service._serve(role, worker, lambda: serve) == 0
    events = [line["event"] for line in lines]
    assert events == ["joined the run", "leaving: the run is finished", "left the run"]


async def test_a_worker_finds_the_runs_own_redis_by_the_address_in_its_folder(
    broker, keys, redis_server, tmp_path, monkeypatch
):
    await publish_config(broker, keys, CONFIG)
    await update_state(broker, keys, status=FINISHED, version=3)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", "")
    monkeypatch.setenv("TIDEMILL_RUNS_DIR", str(tmp_path))
    late = argparse.Namespace(run=keys.run_id, name="late", set=[], config=None, metrics_port=0)
    file = tmp_path / keys.run_id / "redis.url"

    async def serve() -> int:
        return await service._serve("reward", late, lambda: None)

    with pytest.raises(BrokerError, match=re.escape(f"{file} cannot be read")):
        await serve()
    file.parent.mkdir()
    file.touch()  # just being written
    with pytest.raises(BrokerError, match=re.escape(f"{file} is empty")):
        await serve()
    file.write_text(redis_server.url)
    assert await serve() == 0


async def test_a_worker_with_the_address_of_a_redis_that_is_gone_says_where_it_has_it_from(
    keys, tmp_path, monkeypatch
):
    monkeypatch.setenv("TIDEMILL_REDIS_URL", "")
    monkeypatch.setenv("TIDEMILL_RUNS_DIR", str(tmp_path))
    worker = argparse.Namespace(run=keys.run_id, name="w", set=[], config=None, metrics_port=0)
    file = tmp_path / keys.run_id / "redis.url"
    file.parent.mkdir()
    file.write_text(f"unix://{tmp_path}/gone.sock")
    with pytest.raises(UnreachableError, match=re.escape(str(file))):
        await service._serve("reward", worker, lambda: None)


async def test_a_worker_whose_run_has_taken_its_redis_along_leaves_without_an_error(
    keys, tmp_path, monkeypatch
):
    server = RedisServer(tmp_path)
    server.start()
    monkeypatch.setenv("TIDEMILL_REDIS_URL", server.url)
    monkeypatch.setattr(run_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(run_watch, "SILENT_S", 0.02)
    monkeypatch.setattr(broker_module, "STOP_PATIENCE_S", 0.1)
    monkeypatch.setenv(run_watch.RESUME_WAIT_VARIABLE, "0.05")
    broker = await broker_module.Broker.connect(server.url)
    await publish_config(broker, keys, CONFIG)
    await broker.close()

    async def serve(context):
        server.kill()
        await context.broker.execute("GET", keys.config)

    worker = argparse.Namespace(run=keys.run_id, name="w", set=[], config=None, metrics_port=0)
    with capture_logs() as lines:
        assert await service._serve("rollout", worker, lambda: serve) == 0
    assert lines[-1]["event"] == "left the run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("program", ["reward", "rollout", "reward.replica", "reward.sandbox"])
async def test_a_worker_that_is_stopped_while_it_waits_for_its_run_says_so_in_a_line(
    redis_server, program, number
):
    more = ["--servers", "x"] if program == "reward.replica" else []
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tidemill.services.{program}", "--run", "nowhere", *more,
        env=os.environ | {"TIDEMILL_REDIS_URL": redis_server.url},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    written = await process.stderr.readline()
    assert b"waiting for the run to appear" in written
    process.send_signal(number)
    rest_of_log = await process.stderr.read()
    assert await process.wait() == 0
    assert b"Traceback" not in rest_of_log and b"stopped before it had joined a run" in rest_of_log
    assert len(rest_of_log.splitlines()) <= 3


@pytest.mark.parametrize("in_background", [False, True])
async def test_a_service_that_is_stopped_while_it_waits_ends_without_an_error(
    broker, keys, redis_server, monkeypatch, in_background
):
    """A trainer that waits for a full disk, for instance, before it has begun or beside its work."""
    await publish_config(broker, keys, CONFIG)
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)

    async def wait():
        raise service.StoppedError

    async def serve(context):
        if not in_background:
            await wait()
        await asyncio.wait({context.start(wait(), "waits")})
        context.raise_failure()

    stopped = argparse.Namespace(run=keys.run_id, name="t", set=[], config=None, metrics_port=0)
    assert await service._serve("trainer", stopped, lambda: serve) == 0


OURS = Path("/runs/here")


def beat_of(folder: str, host: str = "") -> Heartbeat:
    beat = Heartbeat("trainer", "trainer", folder=folder)
    beat.host = host or beat.host
    return beat


@pytest.mark.parametrize("beat", [beat_of("/runs/elsewhere"), beat_of(str(OURS), host="another")])
async def test_a_trainer_that_goes_on_speaking_elsewhere_is_found(broker, keys, beat):
    await publish_heartbeat(broker, keys, beat)
    check = asyncio.create_task(check_sole_trainer(broker, keys, OURS))

    async def speaks_until_found():
        await publish_heartbeat(broker, keys, beat)
        return check.done()

    await wait_until(speaks_until_found)
    with pytest.raises(ConfigError, match=beat.host):
        await check


async def test_nobody_is_waited_for_where_none_has_spoken_or_died_in_the_same_folder(broker, keys):
    await check_sole_trainer(broker, keys, OURS)
    await publish_heartbeat(broker, keys, beat_of(str(OURS)))
    await check_sole_trainer(broker, keys, OURS)


@pytest.mark.parametrize("age_s", [GONE_AFTER_S - 0.5, GONE_AFTER_S + 1.0])
async def test_a_trainer_that_died_elsewhere_is_waited_for_until_it_counts_as_gone(broker, keys, age_s):
    dead = beat_of("/runs/elsewhere")
    dead.at = time.time() - age_s
    await broker.execute("HSET", keys.workers("trainer"), dead.name, json.dumps(asdict(dead)))
    await check_sole_trainer(broker, keys, OURS)
