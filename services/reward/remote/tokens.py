"""The token that servers of a run and its reward workers share: who has to show it, and who checks it."""

import hmac
import os
from urllib.parse import urlsplit

from tidemill.common.process.http_server import is_loopback

MODEL_TOKEN_VARIABLE = "TIDEMILL_MODEL_TOKEN"  # the variable's name, not a token
MIN_TOKEN_CHARS = 16


def model_token() -> str:
    """The token of this process's environment; empty where there is none."""
    return os.environ.get(MODEL_TOKEN_VARIABLE, "")


def key_for(url: str, is_registered: bool, api_key_env: str) -> str:
    """What to show a server: the run's token to one that registered, else the key that the config names.

    Without a token, servers of the run are on this machine: who registers from elsewhere gets no key.
    """
    if is_registered and (model_token() or not is_loopback(urlsplit(url).hostname or "")):
        return model_token()
    return os.environ.get(api_key_env, "") if api_key_env else ""


def is_shown(authorization: str, token: str) -> bool:
    """Whether a request's header shows the token."""
    scheme, _, shown = authorization.partition(" ")
    # Not `==`, whose time tells how many characters are right.
    return scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode())


def complaint(host: str, token: str) -> str:
    """What is wrong with listening on `host` with this token; empty where nothing is."""
    if token and len(token) < MIN_TOKEN_CHARS:
        problem = f"{MODEL_TOKEN_VARIABLE} has {len(token)} characters; expected at least {MIN_TOKEN_CHARS}"
    elif not token and not is_loopback(host.strip("[]")):
        problem = f"--host {host} lets everybody in who reaches it: {MODEL_TOKEN_VARIABLE} is not set"
    else:
        return ""
    return f"{problem}. Make one with `openssl rand -base64 24`, and give it to the reward workers too."
