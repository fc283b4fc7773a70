"""Tickets and players for sessions in which a script stands for the model."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from tests.support.models import run_config
from tests.support.scripted_model import ByteChat
from tidemill.common.wire.messages import SamplingParams, Ticket
from tidemill.services.rollout.environments.agent import AgentPlayer

CHAT = ByteChat()


def make_ticket(prompt_text: str = "1 + 1?", max_tokens: int = 99, **fields: Any) -> Ticket:
    """A ticket of one sample."""
    known = {"ticket": 0, "step": 0, "min_version": 0, "group_size": 1, "ground_truth": "yes"}
    ids = np.arange(3, dtype=np.int32)
    sampling = SamplingParams(max_tokens=max_tokens)
    return Ticket(**{**known, "prompt_ids": ids, "prompt_text": prompt_text, "sampling": sampling, **fields})


@contextlib.asynccontextmanager
async def agent_player(
    agent: str, max_model_len: int = 2048, model: str = "m", **environment: Any
) -> AsyncIterator[AgentPlayer]:
    """A started player of an agent's sessions."""
    section = {"use": "agent", "agent": agent, "attempts": 1} | environment
    config = run_config(model, model={"max_model_len": max_model_len}, rollout={"environment": section})
    player = AgentPlayer(config, CHAT.decode, lambda: CHAT)
    try:
        await player.start()
        yield player
    finally:
        await player.close()
