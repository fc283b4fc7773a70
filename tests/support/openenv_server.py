"""A game on an OpenEnv server, as its documentation says; run by an interpreter that has the package:
`python openenv_server.py PORT`."""

import os
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Told(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self.num_steps = "", 0

    def reset(self, ground_truth: str = "", **_: object) -> Told:
        self.secret = ground_truth
        return Told(text=" Begin.")

    def step(self, action: Guess, **_: object) -> Told:
        self.num_steps += 1
        if action.message == "break":
            raise RuntimeError("the board fell over")
        if action.message == "sleep":
            time.sleep(30)
        if action.message == "die":
            os._exit(1)
        is_right = bool(self.secret) and action.message == self.secret
        return Told(text=f"{self.num_steps}: no", done=is_right, reward=float(is_right))

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=2)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
