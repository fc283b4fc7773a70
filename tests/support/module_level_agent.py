"""An agent program as documentation shows them: its clients are made while the file is imported."""

import os

import anthropic
import openai

client = openai.OpenAI()
async_client = openai.AsyncOpenAI()
another = anthropic.Anthropic()
MODEL = os.environ["TIDEMILL_MODEL"]


async def with_clients_of_the_module() -> float:
    """Asks with each of them, one twice."""
    said = [
        client.completions.create(model=MODEL, prompt=f"x{number}").choices[0].text for number in range(2)
    ]
    messages = [{"role": "user", "content": "y"}]
    answer = await async_client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    asked = another.messages.create(model=MODEL, max_tokens=9, messages=messages)  # type: ignore[arg-type]
    said += [answer.choices[0].message.content or "", asked.content[0].text]  # type: ignore[union-attr]
    return float(said == ["a", "b", "c", "d"])
