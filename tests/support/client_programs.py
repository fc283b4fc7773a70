"""Programs as the pages of OpenAI's and Anthropic's clients show them: each is one session's agent."""

import json
import os
from typing import Any

import anthropic
import openai
import pydantic

MODEL = os.environ.get("TIDEMILL_MODEL", "")
client = openai.OpenAI()
claude = anthropic.Anthropic()

WEATHER = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}


class CalendarEvent(pydantic.BaseModel):
    """What an answer is read as."""

    name: str
    participants: list[str]


def chat_with_tools() -> float:
    """Calls until the model answers in text."""
    function = {"name": "get_weather", "description": "Temperature.", "parameters": WEATHER, "strict": True}
    tools: Any = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather like in Paris?"}]
    said = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    messages.append(said)
    for call in said.tool_calls or ():
        location = json.loads(call.function.arguments)["location"]  # type: ignore[union-attr]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"14 in {location}"})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    return float(second.choices[0].message.content == "14 degrees")


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


def responses_with_tools() -> float:
    """Sends the items of the first response with the second request."""
    tools: Any = [{"type": "function", "name": "get_weather", "description": "W.", "parameters": WEATHER}]
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    response = client.responses.create(model=MODEL, tools=tools, tool_choice="required", input=items)
    items += response.output
    for item in response.output:
        if item.type == "function_call":
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": "14"})
    last = client.responses.create(model=MODEL, tools=tools, input=items)
    return float(last.output_text == "14 degrees")


def messages_with_tools() -> float:
    """Anthropic's loop, with a forced call at first."""
    tools: Any = [{"name": "get_weather", "description": "Weather", "input_schema": WEATHER}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather like in San Francisco?"}]
    said = claude.messages.create(
        model=MODEL, max_tokens=99, tools=tools, tool_choice={"type": "any"}, messages=messages
    )
    use = next(block for block in said.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "15 degrees"}
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(model=MODEL, max_tokens=99, tools=tools, messages=messages)
    return float(last.content[0].text == "14 degrees")  # type: ignore[union-attr]


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
