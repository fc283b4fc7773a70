"""What sessions cost a rollout worker: two questions.

    python -m benchmarks.sessions

* `held`: 512 sessions held by one rollout service, of four turns each; the environment takes 50 ms to 2 s
  for its answer to each. Once it blocks (so it runs in processes), once it is async. The ideal is the
  longest session's delays alone.
* `gateway`: what a call costs an agent program beyond the engine's own time: HTTP, rendering, parsing,
  recording.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from benchmarks.report import machine, print_result, print_table
from tests.support.models import tiny_model, write_tokenizer
from tests.support.runs import ServiceRun
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig
from tidemill.common.process.programs import run_main
from tidemill.common.streams import append_missing, last_id, length
from tidemill.common.wire.messages import SamplingParams, Ticket
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
        self.delays = row["delays_s"]

    {maybe_async}def step(self, text):
        {sleep}(self.delays.pop())
        return " ".join(f"w{{place}}" for place in range(29)), None, not self.delays
"""
KINDS = {"blocking": ("", "time.sleep"), "async": ("async ", "await asyncio.sleep")}
GROUP_SIZE, TURNS, DELAY_S, ENGINE_S = 8, 4, (0.05, 2.0), 0.1
MODEL_TOKENS = 4096
GATEWAY_SESSIONS, GATEWAY_TURNS, WARM_UP = 40, 8, 5
TEMPLATE = (
    "{% for m in messages %}w1 {{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w1 assistant {% endif %}"
)


def make_config(folder: Path, kind: str, **rollout: Any) -> RunConfig:
    """A run whose sessions play the scripted environment."""
    maybe_async, sleep = KINDS[kind]
    (folder / "scripted.py").write_text(ENVIRONMENT.format(maybe_async=maybe_async, sleep=sleep))
    model = tiny_model(folder / "model", max_position_embeddings=MODEL_TOKENS)
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "max_model_len": MODEL_TOKENS},
            "data": {"train": "unused", "max_prompt_tokens": 64},
            "reward": {"function": "exact_match"},
            "rollout": {"environment": {"use": f"{folder}/scripted.py:Scripted", "max_turns": 16}} | rollout,
        }
    )


def make_ticket(number: int, delays_s: list[float]) -> Ticket:
    """A group of sessions that have as many turns as there are delays."""
    return Ticket(
        prompt_ids=np.arange(3, 19, dtype=np.int32),
        prompt_text="w1 w2",
        extra={"delays_s": delays_s},
        ticket=number,
        step=0,
        min_version=0,
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_tokens=16),
    )


async def measure_held(folder: Path, kind: str, sessions: int) -> tuple[float, float]:
    """Play all sessions at once; returns seconds, measured and ideal."""
    chance = random.Random(0)
    delays = [[chance.uniform(*DELAY_S) for _ in range(TURNS)] for _ in range(sessions // GROUP_SIZE)]
    config = make_config(
        folder,
        kind,
        engine="simulated",
        simulated={"tokens": 16, "group_s": ENGINE_S, "vocab_size": 32},
        sampling={"max_tokens": 16},
        max_num_seqs=65536,
        max_groups_in_flight=len(delays) + 1,
    )
    async with ServiceRun(folder, config, "held") as run:
        run.start("rollout")
        await play(run, delays[:1])  # processes start, modules load
        wall_s = await play(run, delays)
    return wall_s, max(map(sum, delays)) + TURNS * ENGINE_S


async def play(run: ServiceRun, delays: list[list[float]]) -> float:
    """Play a group for each list of delays; returns seconds by Redis's clock."""
    trajectories, begun = run.keys.trajectories(), await run.broker.execute("TIME")
    wanted = await length(run.broker, trajectories) + len(delays) * GROUP_SIZE
    first = await length(run.broker, run.keys.prompts())
    tickets = {number: make_ticket(number, each) for number, each in enumerate(delays, first)}
    await append_missing(run.broker, run.keys.prompts(), list(tickets), tickets.__getitem__)

    async def is_done() -> bool:
        return await length(run.broker, trajectories) >= wanted

    await wait_until(is_done, 600)
    ended_s = int((await last_id(run.broker, trajectories)).partition("-")[0]) / 1000
    return ended_s - int(begun[0]) - int(begun[1]) / 1e6


async def measure_gateway(folder: Path) -> tuple[float, float]:
    """Sessions one after the other, over HTTP on loopback; the engine answers at once, so a call's time is
    what the gateway adds. Returns its median and 99th percentile in milliseconds."""
    config = make_config(folder, "async", engine="transformers", sampling={"max_tokens": 64})
    write_tokenizer(folder / "model", TEMPLATE)
    chat, decode = open_chat(config), open_model(config.model).decode
    sampling, limits = SamplingParams(max_tokens=64), config.rollout.environment
    gateway, times = Gateway("policy"), []
    await gateway.start()
    async with httpx.AsyncClient(timeout=60.0) as client:
        for number in range(GATEWAY_SESSIONS):
            session = GatewaySession(chat, decode, _answer, sampling, limits, 16_384)
            with gateway.serving(session) as root:
                found = await _converse(client, root, session.key)
            await session.close()
            times += found if number >= WARM_UP else []
    await gateway.close()
    p50, p99 = (float(np.percentile(times, share)) for share in (50, 99))
    return p50, p99


async def _answer(ids: Sequence[int], sampling: SamplingParams) -> Generation:
    """An engine that takes no time: the last token ends the turn."""
    tokens = [3 + (len(ids) + place) % 29 for place in range(63)] + [1]
    return Generation(tokens, [-1.0] * len(tokens), ((0, 0),), "stop")


async def _converse(client: httpx.AsyncClient, root: str, key: str) -> list[float]:
    """The time of each call of one session, in milliseconds. The history grows as an agent's does."""
    words = " ".join(f"w{place % 29}" for place in range(100))
    messages, times = [{"role": "user", "content": words}], []
    for _ in range(GATEWAY_TURNS):
        begun = time.perf_counter()
        response = await client.post(
            f"{root}/v1/chat/completions",
            json={"model": "policy", "messages": messages},
            headers={"Authorization": f"Bearer {key}"},
        )
        times.append((time.perf_counter() - begun) * 1e3)
        response.raise_for_status()
        answer = response.json()["choices"][0]["message"]
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": words}]
    return times


def main(sessions: Annotated[int, typer.Option(help="Sessions held at once.")] = 512) -> None:
    """Measure, print a table, and end with one line of JSON."""
    efficiencies: list[float] = []
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            (folder / kind).mkdir()
            wall_s, ideal_s = run_main(measure_held(folder / kind, kind, sessions))
            efficiencies.append(round(ideal_s / wall_s, 3))
            rows.append((f"{sessions} sessions, {kind}", f"{wall_s:.2f} s", f"ideal: {ideal_s:.2f} s"))
        p50, p99 = run_main(measure_gateway(folder))
        rows.append(("a call through the gateway", f"+{p50:.2f} ms", f"p99: +{p99:.2f} ms"))
    print_table("Sessions", ("what", "measured", "beside it"), rows, machine())
    print_result({"efficiency_512": min(efficiencies), "gateway_ms_p50": round(p50, 2)})


if __name__ == "__main__":
    typer.run(main)
