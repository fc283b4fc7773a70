"""Agent programs as people write them, for tests: each plays one session. Clients take seconds to import, so
only the agents that use them import them."""

import os
import time
import urllib.request
from typing import Any

import openai


def twice(row: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """Plain, with OpenAI's client: asks twice; the reward is whether the last answer is the truth."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(2):
        said = client.chat.completions.create(model=model, messages=messages).choices[0].message
        messages += [said, {"role": "user", "content": "Sure?"}]
    return {"reward": float(said.content == row["ground_truth"]), "metrics": {"asked": 2}}


async def with_anthropic(anthropic_base_url: str, api_key: str) -> float:
    """Async, with Anthropic's client, as a stream."""
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=anthropic_base_url, api_key=api_key)
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    async with client.messages.stream(**asked) as stream:
        return float(len(await stream.get_final_text()))


def for_ever() -> None:
    """Goes on until an error ends it; its clients read the variables."""
    import openai

    client = openai.OpenAI()
    messages = [{"role": "user", "content": "Go."}]
    while True:
        said = client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
        messages += [said.choices[0].message, {"role": "user", "content": "On."}]  # type: ignore[list-item]


def asking_and_working() -> None:
    """Works on the first answer for longer than a session lasts."""
    _ask_once()
    time.sleep(3600)


def impatient() -> float:
    """Asks twice, and scores what it has where the second answer does not come."""
    import openai

    client = openai.OpenAI(timeout=8.0, max_retries=0)
    client.completions.create(model="m", prompt="x")
    try:
        client.completions.create(model="m", prompt="y")
    except openai.APITimeoutError:
        return 0.0
    return 1.0


def late_by_itself() -> dict[str, Any]:
    """Has a limit of time of its own."""
    _ask_once()
    return {"reward": 0.25, "timeout": True}


def branching() -> None:
    """One branch asks too much, the other goes on; then the program fails with the first one's error."""
    import openai

    client = openai.OpenAI()
    try:
        client.completions.create(model="m", prompt="x" * 4000)
    except openai.BadRequestError as error:
        client.completions.create(model="m", prompt="Go.")
        raise RuntimeError("a branch failed") from error


def raising() -> None:
    raise LookupError("the page is gone")


def _ask_once() -> str:
    import openai

    return str(openai.OpenAI().completions.create(model="m", prompt="x").choices[0].text)


def raising_as_frameworks_do() -> None:
    """Validates the model's answer with pydantic, whose class of error says that the answer is wrong."""
    import pydantic

    pydantic.TypeAdapter(dict[str, int]).validate_json(_ask_once())


def raising_once_answered() -> None:
    raise KeyError(_ask_once())


def exiting_once_answered() -> None:
    raise SystemExit(_ask_once())


def raising_of_the_machine() -> None:
    raise LookupError(_ask_once()) from ConnectionError("no database")


def dying() -> None:
    os._exit(3)


def silent() -> None:
    time.sleep(3600)


def endless(base_url: str, api_key: str) -> None:
    """Runs the model's code, which never ends."""
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    body = b'{"model": "m", "prompt": "Write."}'
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/completions", body, headers)) as answer:
        answer.read()
    time.sleep(3600)


def idle() -> str:
    """Never asks."""


def wordy(base_url: str, api_key: str) -> str:
    """Returns a reward that is no number."""
    import openai

    openai.OpenAI(base_url=base_url, api_key=api_key).completions.create(model="m", prompt="x")
    return "good"


def demanding(row: dict[str, Any], browser: str) -> None:
    """Has a parameter that sessions do not give."""


def forking(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Goes on once, and asks another question: two segments, the first of two turns."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    prompt = row["prompt"]
    for more in ("", "=", None):
        prompt = row["prompt"][::-1] if more is None else prompt + more
        prompt += client.completions.create(model="m", prompt=prompt).choices[0].text
    return float(str(row["ground_truth"]) in prompt)
