"""What sessions cost a rollout worker: three questions.

    python -m benchmarks.sessions                   # held, gateway
    python -m benchmarks.sessions --only slots      # one of: held, gateway, slots (with vLLM)

* `held`: 512 sessions held by one rollout service, of four turns each; the environment takes 50 ms to 2 s
  for its answer to each. Once it blocks (so it runs in processes), once it is async. The ideal is the
  longest session's delays alone.
* `gateway`: what a call costs an agent program beyond the engine's own time: HTTP, rendering, parsing,
  recording. Sessions one after the other, over loopback; the engine answers at once.
* `slots`: sessions that grow in a vLLM whose KV cache has 16 MB: tokens a second and preemptions with fixed
  numbers of groups in flight, each in turns with `max_groups_in_flight: auto`. Long sessions of which each is
  a group, then short ones in groups of eight, on the same engine.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple

import httpx
import numpy as np
import typer

from benchmarks.report import in_turns, machine, print_result, print_table
from benchmarks.services import redis_time_s, time_of_entry
from tests.support.letters import make_ticket
from tests.support.models import tiny_model, write_tokenizer
from tests.support.runs import ServiceRun
from tests.support.training import messages
from tests.support.trajectories import make_config
from tidemill.common.config import RunConfig
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.process.programs import run_main
from tidemill.common.streams import append_missing, length
from tidemill.common.wire.messages import SamplingParams, Ticket, Trajectory
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.engines.model import open_model
from tidemill.services.rollout.gateway.server import Gateway
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.sessions.template_chat import open_chat

ENVIRONMENT = """
import asyncio
import time

class Scripted:
    {maybe_async}def reset(self, row):
        self.left, self.words = row["turns"], row["words"]
        self.delays = iter(row["delays_s"])

    {maybe_async}def step(self, text):
        {sleep}(next(self.delays))
        self.left -= 1
        return " ".join(f"w{{place % 29}}" for place in range(self.words)), None, self.left <= 0
"""
KINDS = {"blocking": ("", "time.sleep"), "async": ("async ", "await asyncio.sleep")}


class Shape(NamedTuple):
    """Sessions that are played; those of a group share their turns and delays."""

    groups: int
    size: int
    turns: tuple[int, int]
    delay_s: tuple[float, float]
    words: int = 32
    """Words of the environment's answer to each turn."""

    def delays(self, seed: int = 0) -> list[list[float]]:
        """Seconds that the environment takes for each turn of each group."""
        chance = random.Random(seed)
        turns = [chance.randint(*self.turns) for _ in range(self.groups)]
        delays_s = []
        for num_turns in turns:
            delays_s.append([chance.uniform(*self.delay_s) for _ in range(num_turns)])
        return delays_s


HELD_DELAY_S = (0.05, 2.0)
HELD_TURNS = 4
ENGINE_S = 0.1
FIXED = (16, 24, 32)
ROUNDS = 2
MANY = 64
"""Numbers of groups in flight, how often each is measured, and one at which the cache overflows."""
SHAPES = {
    "long": Shape(groups=96, size=1, turns=(6, 14), delay_s=(0.02, 0.2), words=96),
    "short": Shape(groups=96, size=8, turns=(1, 4), delay_s=(0.02, 0.2)),
}
CACHE_BYTES = 16 << 20
TOKEN_BYTES = 1024
BLOCK_TOKENS = 32
"""A token has keys and values of two layers with two heads of 32 float32 numbers."""
MODEL_TOKENS = 4096
GATEWAY_SESSIONS = 40
GATEWAY_TURNS = 8
WARM_UP = 5
TEMPLATE = (
    "{% for m in messages %}w1 {{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w1 assistant {% endif %}"
)


def config_of(folder: Path, kind: str, **rollout: Any) -> RunConfig:
    """A run whose sessions play the scripted environment."""
    maybe_async, sleep = KINDS[kind]
    (folder / "scripted.py").write_text(ENVIRONMENT.format(maybe_async=maybe_async, sleep=sleep))
    # Heads of 32, as vLLM wants them; nearly equal logits end a turn after 32 tokens, on average.
    sizes = {"max_position_embeddings": MODEL_TOKENS, "hidden_size": 128, "initializer_range": 0.02}
    model = {"path": str(tiny_model(folder / "model", **sizes)), "max_model_len": MODEL_TOKENS}
    environment = {"use": f"{folder}/scripted.py:Scripted", "max_turns": 16}
    reward = {"function": "exact_match"}
    data = {"train": "unused", "max_prompt_tokens": 64}
    return make_config(model=model, data=data, reward=reward, rollout={"environment": environment} | rollout)


def ticket_of(number: int, shape: Shape, delays_s: Sequence[float], max_tokens: int) -> Ticket:
    """A group of sessions that have as many turns as there are delays."""
    row = {"delays_s": list(delays_s), "turns": len(delays_s), "words": shape.words}
    ids = np.arange(3, 19, dtype=np.int32)
    sampling = SamplingParams(max_tokens=max_tokens)
    group = {"step": 0, "group_size": shape.size, "sampling": sampling}
    return make_ticket(number, prompt_ids=ids, prompt_text="w1 w2", extra=row, **group)


async def measure_held(folder: Path, kind: str, sessions: int) -> tuple[float, float]:
    """Play all sessions at once; returns seconds, measured and ideal."""
    shape = Shape(sessions // 8, 8, (HELD_TURNS, HELD_TURNS), HELD_DELAY_S)
    config = config_of(
        folder,
        kind,
        engine="simulated",
        simulated={"tokens": 16, "group_s": ENGINE_S, "vocab_size": 32},
        sampling={"max_tokens": 16},
        max_num_seqs=65536,
        max_groups_in_flight=shape.groups + 1,
    )
    async with ServiceRun(folder, config, "held") as run:
        run.start("rollout")
        await play(run, shape._replace(groups=1))  # processes start, modules load
        wall_s = await play(run, shape)
    return wall_s, max(map(sum, shape.delays())) + HELD_TURNS * ENGINE_S


async def play(run: ServiceRun, shape: Shape) -> float:
    """Seconds by Redis's clock from the tickets to the last trajectory."""
    prompts = run.keys.prompts()
    trajectories = run.keys.trajectories()
    wanted = await length(run.broker, trajectories) + shape.groups * shape.size
    max_tokens = run.config.rollout.sampling.max_tokens
    first = await length(run.broker, prompts)
    tickets = {n: ticket_of(n, shape, each, max_tokens) for n, each in enumerate(shape.delays(), first)}
    begun_s = await redis_time_s(run)
    await append_missing(run.broker, prompts, list(tickets), tickets.__getitem__)
    return await time_of_entry(run, trajectories, wanted, 600) - begun_s


class Measured(NamedTuple):
    """Figures of one shape with one number of slots: tokens a second, and preemptions for 1,000 turns."""

    speed: float
    preempted: float


async def measure_slots(folder: Path, slots: int | str) -> dict[str, Measured]:
    """Play all shapes with this number of slots, on one engine."""
    num_blocks = CACHE_BYTES // TOKEN_BYTES // BLOCK_TOKENS
    config = config_of(
        folder,
        "async",
        engine="vllm",
        num_threads=1,
        # A turn that is cut would end its session.
        sampling={"max_tokens": 256},
        max_num_seqs=512,
        max_groups_in_flight=slots,
        vllm={
            "enforce_eager": True,
            "extra": {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": num_blocks},
        },
    )
    figures = {}
    async with ServiceRun(folder, config, "slots", is_forked=False) as run:
        run.start("rollout")
        await play(run, SHAPES["long"]._replace(groups=1))
        for name, shape in SHAPES.items():
            before = await _num_preempted(run)
            wall_s = await play(run, shape)
            num_preempted = await _num_preempted(run) - before
            samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
            turns = [
                turn for sample in samples[-shape.groups * shape.size :] for turn in sample.session.turns
            ]
            tokens = sum(turn.num_tokens for turn in turns)
            figures[name] = Measured(tokens / wall_s, 1000 * num_preempted / len(turns))
    return figures


async def _num_preempted(run: ServiceRun) -> float:
    """Preemptions so far, from the worker's /metrics."""
    (beat,) = await read_heartbeats(run.broker, run.keys)
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{beat.metrics_target}/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines()]
    return sum(float(value) for key, _, value in lines if key.startswith("vllm:num_preemptions_total"))


async def measure_gateway(folder: Path) -> tuple[float, float]:
    """What the gateway adds to a call: median and 99th percentile in milliseconds."""
    config = config_of(folder, "async", engine="transformers", sampling={"max_tokens": 64})
    write_tokenizer(folder / "model", TEMPLATE)
    chat = open_chat(config)
    decode = open_model(config.model).reader.text_of
    sampling = SamplingParams(max_tokens=64)
    limits = config.rollout.environment
    gateway = Gateway("policy")
    times = []
    await gateway.start()
    async with httpx.AsyncClient(timeout=60.0) as client:
        for number in range(GATEWAY_SESSIONS):
            session = GatewaySession(chat, decode, _answer, sampling, limits, 16_384)
            with gateway.serving(session) as root:
                conversation = await _converse(client, root, session.key)
            await session.close()
            times += conversation if number >= WARM_UP else []
    await gateway.close()
    return float(np.percentile(times, 50)), float(np.percentile(times, 99))


async def _answer(ids: Sequence[int], sampling: SamplingParams) -> Generation:
    """An engine that takes no time: the last token ends the turn."""
    tokens = [3 + (len(ids) + number) % 29 for number in range(63)] + [1]
    return Generation(tokens, [-1.0] * len(tokens), ((0, 0),), "stop")


async def _converse(client: httpx.AsyncClient, root: str, key: str) -> list[float]:
    """The time of each call of one session, in milliseconds. The history grows as an agent's does."""
    url = f"{root}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {key}"}
    asked = {"role": "user", "content": " ".join(f"w{number % 29}" for number in range(100))}
    history = [asked]
    times = []
    for _ in range(GATEWAY_TURNS):
        begun = time.perf_counter()
        response = await client.post(url, json={"model": "policy", "messages": history}, headers=headers)
        times.append((time.perf_counter() - begun) * 1e3)
        response.raise_for_status()
        content = response.json()["choices"][0]["message"]["content"]
        history += [{"role": "assistant", "content": content}, asked]
    return times


def in_folder(measure: Any, *arguments: Any) -> Any:
    """Run a measurement in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run_main(measure(Path(folder), *arguments))


def report_slots() -> dict[str, float]:
    """The sweep of fixed numbers, and how `auto` compares with 64 and with the fastest of them."""
    play = {slots: partial(in_folder, measure_slots, slots) for slots in (*FIXED, MANY, "auto")}
    # In turns with each: a machine's speed drifts by more than they differ.
    played = {}
    for slots in FIXED:
        played[slots] = in_turns({slots: play[slots], "auto": play["auto"]}, ROUNDS)
    many = play[MANY]()
    result = {}
    for name in SHAPES:
        rows = []
        ratios = []
        autos = []
        for slots in FIXED:
            plays_of_fixed, plays_of_auto = played[slots].values()
            fixed = [plays[name] for plays in plays_of_fixed]
            auto = [plays[name] for plays in plays_of_auto]
            pairs = zip(auto, fixed, strict=True)
            ratios.append(mean(of_auto.speed / of_fixed.speed for of_auto, of_fixed in pairs))
            autos += [of_auto.preempted for of_auto in auto]
            fixed_speed = mean(of_fixed.speed for of_fixed in fixed)
            auto_speed = mean(of_auto.speed for of_auto in auto)
            preempted = mean(of_fixed.preempted for of_fixed in fixed)
            rows.append((slots, f"{fixed_speed:,.0f}", f"{auto_speed:,.0f}", f"{preempted:.1f}"))
        rows.append((MANY, f"{many[name].speed:,.0f}", "", f"{many[name].preempted:.1f}"))
        rows.append(("auto", "", "", f"{mean(autos):.1f}"))
        columns = "groups in flight,tokens/s,tokens/s of auto beside it,preemptions per 1000 turns"
        print_table(f"Slots, {name} sessions, KV cache of 16 MB", columns, rows, machine())
        result |= {
            f"slots_{name}_preemptions_64": round(many[name].preempted, 1),
            f"slots_{name}_preemptions_auto": round(mean(autos), 2),
            f"slots_{name}_speed_to_best": round(min(ratios), 3),
        }
    return result


def main(only: Literal["", "held", "gateway", "slots"] = "", sessions: int = 512) -> None:
    """Measure, print a table, and end with one line of JSON."""
    if only == "slots":
        print_result(report_slots())
        return
    rows = []
    result = dict[str, float]()
    for kind in KINDS if only != "gateway" else ():
        wall_s, ideal_s = in_folder(measure_held, kind, sessions)
        rows.append((f"{sessions} sessions, {kind}", f"{wall_s:.2f} s", f"ideal: {ideal_s:.2f} s"))
        result["efficiency_512"] = min(result.get("efficiency_512", 2.0), round(ideal_s / wall_s, 3))
    if only != "held":
        p50, p99 = in_folder(measure_gateway)
        result["gateway_ms_p50"] = round(p50, 2)
        rows.append(("a call through the gateway", f"+{p50:.2f} ms", f"p99: +{p99:.2f} ms"))
    print_table("Sessions", "what,measured,beside it", rows, machine())
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
