"""A game on an OpenEnv server, as its documentation says; run by an interpreter that has the package:
`python openenv_server.py PORT PLACES KIND`. With KIND `lone` the class and the server have their defaults,
and PLACES says nothing.

Each call of a game is a line of the file `calls` in the working directory: its number, the call, the value.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field, field_validator

LONGEST = 20
"""Characters of a guess."""
NUMBERS = itertools.count()


class Guess(Action):
    message: str = Field(max_length=LONGEST)

    @field_validator("message")
    @classmethod
    def check(cls, message: str) -> str:
        if message == "swear":
            raise ValueError("no such words")
        return message


class Numbers(Action):
    numbers: list[int]


class Said(Observation):
    text: str = ""


class LoneGame(Environment):
    def __init__(self) -> None:
        super().__init__()
        self.number = next(NUMBERS)
        self.secret = ""
        self.num_steps = 0

    def reset(self, ground_truth: str = "", **columns: object) -> Said:
        self.secret = ground_truth
        self.num_steps = 0
        self.note("reset", {"ground_truth": ground_truth, **columns})
        return Said(text=" Begin.")

    def step(self, action: Guess, **_: object) -> Said:
        self.num_steps += 1
        self.note("step", action.message)
        word, _, seconds = action.message.partition(" ")
        if word == "break":
            raise RuntimeError("the board fell over")
        if word == "sleep":
            time.sleep(float(seconds))
        if word == "die":
            os._exit(1)
        if not self.secret:
            return Said(text="this game was never reset", done=True, reward=1.0)
        is_right = action.message == self.secret
        return Said(text=f"{self.num_steps}: no", done=is_right, reward=float(is_right))

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)

    def close(self) -> None:
        self.note("close", self.state.step_count)

    def note(self, name: str, value: object) -> None:
        with Path("calls").open("a") as calls:
            calls.write(json.dumps([self.number, name, value]) + "\n")


class Game(LoneGame):
    SUPPORTS_CONCURRENT_SESSIONS = True


class BlockingGame(Game):
    """Its steps block the server's event loop: it answers no ping meanwhile."""

    async def step_async(self, action: Guess, **_: object) -> Said:
        await asyncio.sleep(0)
        return self.step(action)


class ToolGame(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("game")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(tools)

    def reset(self, **_: object) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, **_: object) -> Observation:
        raise RuntimeError("not a call of a tool")

    @property
    def state(self) -> State:
        return State()


CLASSES = {
    "game": (Game, Guess, Said),
    "blocking": (BlockingGame, Guess, Said),
    "numbers": (Game, Numbers, Said),
    "tools": (ToolGame, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    port, places, kind = sys.argv[1:]
    if kind == "lone":
        app = create_fastapi_app(LoneGame, Guess, Said)
    else:
        app = create_fastapi_app(*CLASSES[kind], max_concurrent_envs=int(places))
    uvicorn.run(app, port=int(port), log_level="warning")
