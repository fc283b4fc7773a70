"""Programs as the pages of OpenAI's and Anthropic's clients show them: each is one session's agent."""

import os
from typing import Any

import anthropic
import openai
import pydantic

MODEL = os.environ.get("TIDEMILL_MODEL", "")
client = openai.OpenAI()
claude = anthropic.Anthropic()


class CalendarEvent(pydantic.BaseModel):
    """What an answer is read as."""

    name: str
    participants: list[str]


def parsed_chat() -> float:
    """Structured output of a chat."""
    messages: Any = [{"role": "user", "content": "Alice and Bob go to a fair."}]
    completion = client.chat.completions.parse(model=MODEL, messages=messages, response_format=CalendarEvent)
    event = completion.choices[0].message.parsed
    return float(event is not None and event.name == "fair")


def parsed_response() -> float:
    """Structured output of a response."""
    response = client.responses.parse(model=MODEL, input="Alice goes to a fair.", text_format=CalendarEvent)
    return float(response.output_parsed is not None and response.output_parsed.name == "fair")


@anthropic.beta_tool
def get_weather(location: str) -> str:
    """Get the weather.

    Args:
        location: The city
    """
    return f"14 degrees in {location}"


def tool_runner() -> float:
    """Anthropic's own loop, which may leave its history with the server."""
    messages: Any = [{"role": "user", "content": "What is the weather in SF?"}]
    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=99, tools=[get_weather], messages=messages
    )
    return float(runner.until_done().content[0].text == "14 degrees")  # type: ignore[union-attr]
