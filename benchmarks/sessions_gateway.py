"""What a call through the gateway adds to the engine's own time."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from tests.support.models import tiny_model, write_tokenizer
from tidemill.common.config import RunConfig
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.engines.model import open_model
from tidemill.services.rollout.gateway.server import Gateway
from tidemill.services.rollout.gateway.session import GatewaySession, Limits
from tidemill.services.rollout.sessions.template_chat import open_chat

SESSIONS, TURNS, WARM_UP = 40, 8, 5
ANSWER_TOKENS, MESSAGE_WORDS = 64, 100
LIMITS = Limits(max_turns=TURNS, max_tokens=0, max_model_len=16_384)
TEMPLATE = (
    "{% for m in messages %}w1 {{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}w1 assistant {% endif %}"
)


@dataclass(frozen=True)
class GatewayTimes:
    """What calls took beyond the engine's own time, in milliseconds."""

    added_ms_p50: float
    added_ms_p99: float


async def measure_gateway() -> GatewayTimes:
    """Sessions of eight turns one after the other, over HTTP on loopback; the engine answers at once."""
    with tempfile.TemporaryDirectory() as name:
        model = tiny_model(Path(name))
        write_tokenizer(model, TEMPLATE)
        config = RunConfig.model_validate(
            {
                "model": {"path": str(model), "max_model_len": 128},
                "data": {"train": "unused", "max_prompt_tokens": 64},
                "rollout": {"engine": "transformers", "sampling": {"max_tokens": 64}},
            }
        )
        chat, folder = open_chat(config), open_model(config.model)
        gateway = Gateway("policy")
        await gateway.start()
        times: list[float] = []
        async with httpx.AsyncClient(timeout=60.0) as client:
            for number in range(SESSIONS):
                session = GatewaySession(chat, folder.decode, _answer, SamplingParams(max_tokens=64), LIMITS)
                with gateway.serving(session) as root:
                    found = await _converse(client, root, session.key)
                await session.close()
                times += found if number >= WARM_UP else []
        await gateway.close()
    return GatewayTimes(*(float(np.percentile(times, share)) for share in (50, 99)))


async def _answer(ids: Sequence[int], sampling: SamplingParams) -> Generation:
    """An engine that takes no time: the last token ends the turn."""
    tokens = [3 + (len(ids) + place) % 29 for place in range(ANSWER_TOKENS - 1)] + [1]
    return Generation(tokens, [-1.0] * ANSWER_TOKENS, ((0, 0),), "stop")


async def _converse(client: httpx.AsyncClient, root: str, key: str) -> list[float]:
    """The time of each call of one session, in milliseconds. The history grows as an agent's does."""
    words = " ".join(f"w{place % 29}" for place in range(MESSAGE_WORDS))
    messages, times = [{"role": "user", "content": words}], []
    for _ in range(TURNS):
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
