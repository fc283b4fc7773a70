"""The token that servers of a run and its reward workers share."""

import os
from urllib.parse import urlsplit

from tidemill.common.process.http_server import is_loopback
from tidemill.common.process.json_api import token_problem

MODEL_TOKEN_VARIABLE = "TIDEMILL_MODEL_TOKEN"  # the variable's name, not a token


def model_token() -> str:
    """The token of this process's environment; empty where there is none."""
    return os.environ.get(MODEL_TOKEN_VARIABLE, "")


def key_for(url: str, is_registered: bool, api_key_env: str) -> str:
    """The key to send to a server: the run's token if it registered, else the key that the config names.

    Without a token, the run's servers are on this machine: one that registers from elsewhere gets no key.
    """
    if is_registered and (model_token() or not is_loopback(urlsplit(url).hostname or "")):
        return model_token()
    return os.environ.get(api_key_env, "") if api_key_env else ""


def complaint(host: str, token: str) -> str:
    """What is wrong with listening on `host` with this token; empty where nothing is."""
    return token_problem(host, token, MODEL_TOKEN_VARIABLE, "the reward workers")
