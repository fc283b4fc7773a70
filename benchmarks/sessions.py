"""What sessions cost a rollout worker: two questions, one number each.

    python -m benchmarks.sessions                   # both
    python -m benchmarks.sessions --only held       # one of: held, gateway

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
from tidemill.common.process.heartbeats import read_heartbeats
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
        self.left = row["turns"]
        self.delays = iter(row["delays_s"])

    {maybe_async}def step(self, text):
        {sleep}(next(self.delays))
        self.left -= 1
        return " ".join(f"w{{place % 29}}" for place in range(32)), None, self.left <= 0
"""
KINDS = {"blocking": ("", "time.sleep"), "async": ("async ", "await asyncio.sleep")}
GROUP_SIZE, DELAY_S, ENGINE_S = 8, (0.05, 2.0), 0.1
HELD_TURNS = 4
GATEWAY_SESSIONS, GATEWAY_TURNS, WARM_UP = 40, 8, 5
TEMPLATE = (
    "{% for m in messages %}w1 {{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w1 assistant {% endif %}"
)


def make_config(folder: Path, kind: str, **rollout: Any) -> RunConfig:
    """A run whose sessions play the scripted environment."""
    maybe_async, sleep = KINDS[kind]
    (folder / "scripted.py").write_text(ENVIRONMENT.format(maybe_async=maybe_async, sleep=sleep))
    model = tiny_model(folder / "model", max_position_embeddings=1024)
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "max_model_len": 1024},
            "data": {"train": "unused", "max_prompt_tokens": 64},
            "reward": {"function": "exact_match"},
            "rollout": {"environment": {"use": f"{folder}/scripted.py:Scripted", "max_turns": 8}} | rollout,
        }
    )


def make_ticket(number: int, delays_s: Sequence[float]) -> Ticket:
    """A group of sessions that have as many turns as there are delays."""
    return Ticket(
        prompt_ids=np.arange(3, 19, dtype=np.int32),
        prompt_text="w1 w2",
        extra={"delays_s": list(delays_s), "turns": len(delays_s)},
        ticket=number,
        step=0,
        min_version=0,
        group_size=GROUP_SIZE,
        sampling=SamplingParams(max_tokens=16),
    )


async def measure_held(folder: Path, kind: str, sessions: int) -> tuple[float, float]:
    """Play all sessions at once; returns seconds, measured and ideal.

    The clock is Redis's, from the tickets to the last trajectory.
    """
    chance = random.Random(0)
    # The samples of a group share their row, and so their delays.
    delays = [[chance.uniform(*DELAY_S) for _ in range(HELD_TURNS)] for _ in range(sessions // GROUP_SIZE)]
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
        trajectories = run.keys.trajectories()

        async def is_ready() -> bool:
            beats = await read_heartbeats(run.broker, run.keys)
            return any("requests" in beat.counts for beat in beats)

        async def play(first: int, groups: Sequence[Sequence[float]]) -> None:
            wanted = await length(run.broker, trajectories) + len(groups) * GROUP_SIZE
            tickets = {n: make_ticket(n, each) for n, each in enumerate(groups, first)}
            await append_missing(run.broker, run.keys.prompts(), list(tickets), tickets.__getitem__)

            async def is_done() -> bool:
                return await length(run.broker, trajectories) >= wanted

            await wait_until(is_done, 600)

        run.start("rollout")
        await wait_until(is_ready, 300)
        await play(0, delays[:1])  # processes start, modules load
        seconds, microseconds = await run.broker.execute("TIME")
        await play(1, delays)
        ended_s = int((await last_id(run.broker, trajectories)).partition("-")[0]) / 1000
    return ended_s - int(seconds) - int(microseconds) / 1e6, max(map(sum, delays)) + HELD_TURNS * ENGINE_S


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


def main(
    only: Annotated[str, typer.Option(help="One of held, gateway; empty: both.")] = "",
    sessions: Annotated[int, typer.Option(help="Sessions held at once.")] = 512,
) -> None:
    """Measure, print a table, and end with one line of JSON."""
    if only not in ("", "held", "gateway"):
        raise typer.BadParameter(f"{only!r} is neither held nor gateway")
    result: dict[str, float | None] = dict.fromkeys(("efficiency_512", "gateway_ms_p50"))
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS if only in ("", "held") else ():
            (folder / kind).mkdir()
            wall_s, ideal_s = run_main(measure_held(folder / kind, kind, sessions))
            result["efficiency_512"] = min(
                result["efficiency_512"] or float("inf"), round(ideal_s / wall_s, 3)
            )
            rows.append((f"{sessions} sessions, {kind}", f"{wall_s:.2f} s", f"ideal: {ideal_s:.2f} s"))
        if only in ("", "gateway"):
            p50, p99 = run_main(measure_gateway(folder))
            result["gateway_ms_p50"] = round(p50, 2)
            rows.append(("a call through the gateway", f"+{p50:.2f} ms", f"p99: +{p99:.2f} ms"))
    print_table("Sessions", ("what", "measured", "beside it"), rows, machine())
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
