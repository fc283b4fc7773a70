"""Public agents and frameworks behind a proxy that loses, halves and delays: nothing is trained that no
program has read.

Each program asks again where its SDK has given up, and begins again where its agent has. Where they cannot be
installed, the tests are skipped.
"""

import asyncio
import itertools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import NPM, VENVS, command_of, line_of
from tests.support.lossy_proxy import LossyProxy, Mode
from tests.support.scripted_model import CHAT, ScriptedModel, agent_player, make_ticket
from tidemill.common.errors import EnvironmentFaultError
from tidemill.common.wire.messages import SamplingParams
from tidemill.common.wire.segments import Segment

FRAMEWORKS = [*VENVS, *NPM]
LOSSES: list[Mode] = ["lose", "halve", "hang_up", "fail"]
KEPT: list[Mode] = ["delay", "pass"]
MOST_IN_ROW = 2
"""SDKs ask three times. A program that ends after an answer that only the proxy has lost leaves nothing by
which a gateway could know of it."""
FAILING = "strands"
"""Its agent fails where a stream breaks in its middle, and its program begins again."""
NUM_LOSSES = 8
MAX_TURNS = NUM_LOSSES + 3
"""After the losses some turns are left, so that the last answer arrives."""
NUM_TRIES = 3
"""Agents that a program begins. The last one must not fail: the program would hide it, and give a reward, so
nothing would say that its last answer was lost."""
SLOW_S = 0.06
"""Longer than the proxy waits before it hangs up."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


class MarkedModel:
    """Each answer has a mark of its own, such as `T7T`, so that a text says which turn it is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count(1)

    async def ask(self, ids: Sequence[int], sampling: SamplingParams) -> Any:
        await asyncio.sleep(SLOW_S)
        return await ScriptedModel(line_of(self._name, f"T{next(self._numbers)}T")).ask(ids, sampling)


def losses_of(name: str, seed: int) -> list[Mode]:
    """What is done to requests, one after the other."""
    chance = random.Random(f"{name} {seed}")
    modes: list[Mode] = []
    while len(modes) < NUM_LOSSES:
        is_lost_for_long = len(modes) >= MOST_IN_ROW and not set(modes[-MOST_IN_ROW:]) & set(KEPT)
        choices = KEPT if is_lost_for_long else [*LOSSES, *KEPT]
        if name == FAILING and modes.count("halve") == NUM_TRIES - 1:
            choices = [mode for mode in choices if mode != "halve"]
        modes.append(chance.choice(choices))
    return modes


def marks_in(text: str) -> list[str]:
    return re.findall(r"T\d+T", text)


def trained_in(segments: Sequence[Segment]) -> list[str]:
    """The marks of the turns that are trained."""
    texts = [CHAT.decode(segment.completion_ids[segment.mask].tolist()) for segment in segments]
    return sorted(set(marks_in(" ".join(texts))))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_what_a_framework_has_not_read_is_not_trained(name: str, seed: int, tmp_path: Path) -> None:
    command = f"$ {command_of(name, tmp_path, NUM_TRIES)}"
    section = {"max_turns": MAX_TURNS, "max_segments": 100}
    async with agent_player(command, max_model_len=1 << 18, **section) as player:
        gateway = player._gateway
        port = gateway.root.rpartition(":")[2]
        async with LossyProxy(int(port), losses_of(name, seed)).serving() as proxy:
            gateway.root = gateway.root.replace(port, str(proxy.port))
            try:
                played = await player.play(make_ticket(max_tokens=500), "s", MarkedModel(name).ask)
            except EnvironmentFaultError as fault:
                # Nothing is trained.
                assert fault.kind == "lost", fault
                return
    assert played.session is not None
    trained = trained_in([played.first, *played.session.forks])
    received = marks_in(proxy.received.decode())
    sent_back = set(marks_in(proxy.asked.decode()))
    described = (proxy.done, trained, received, played.session.unread)
    assert set(trained) <= set(received), described
    # The last answer is the only one that a program has read and not sent back.
    assert set(trained) - sent_back <= {received[-1]}, described
    assert played.session.reward == 0.5 and trained, described
    assert len(proxy.done) > NUM_LOSSES, f"it ended before all losses: {described}"


async def test_a_program_that_does_not_hide_that_its_agent_has_failed_is_a_fault(tmp_path: Path) -> None:
    command = f"$ {command_of(FAILING, tmp_path, raises=True)}"
    async with agent_player(command, max_model_len=1 << 18, max_turns=MAX_TURNS) as player:
        gateway = player._gateway
        port = gateway.root.rpartition(":")[2]
        async with LossyProxy(int(port), ["pass", "halve"]).serving() as proxy:
            gateway.root = gateway.root.replace(port, str(proxy.port))
            with pytest.raises(EnvironmentFaultError, match="exit code 1"):
                await player.play(make_ticket(max_tokens=500), "s", MarkedModel(FAILING).ask)
    assert proxy.done == ["pass", "halve"]
    assert marks_in(proxy.asked.decode()), "the first answer was read"
