# mypy: disable-error-code="import-not-found, import-untyped"
"""Agents of public frameworks, each as its users write it: they go on until an error or a limit ends them.

    python framework_programs.py NAME

The reward is the own one of the program, which computes it however its agent ended.
"""

import asyncio
import json
import os
import sys
from typing import Any

MODEL = os.environ.get("TIDEMILL_MODEL", "m")
MANY = 1000
TASK = "Go on until you are stopped."


def noop(number: int) -> str:
    """Do nothing.

    Args:
        number: Any number.
    """
    return "on"


def openai_chat() -> None:
    import openai

    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        said = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message
        messages += [said, {"role": "user", "content": "On."}]


def openai_responses() -> None:
    import openai

    client = openai.OpenAI()
    items: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        items += client.responses.create(model=MODEL, input=items).output
        items.append({"role": "user", "content": "On."})


def anthropic_messages() -> None:
    import anthropic

    client = anthropic.Anthropic()
    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        with client.messages.stream(model=MODEL, max_tokens=99, messages=messages) as stream:
            messages.append({"role": "assistant", "content": stream.get_final_text()})
        messages.append({"role": "user", "content": "On."})


def _litellm(model: str, **more: Any) -> None:
    import litellm

    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        answer = litellm.completion(model=model, messages=messages, **more)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "On."}]


def litellm_openai() -> None:
    _litellm(f"openai/{MODEL}")


def litellm_retries() -> None:
    _litellm(f"openai/{MODEL}", num_retries=2)


def litellm_anthropic() -> None:
    _litellm(f"anthropic/{MODEL}")


def mini_swe_agent() -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    model = get_model(f"openai/{MODEL}", {"cost_tracking": "ignore_errors"})
    templates = {"system_template": "You act.", "instance_template": "{{ task }}"}
    DefaultAgent(model, LocalEnvironment(), **templates).run(TASK)


def langchain() -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL)
    messages: list[Any] = [("user", TASK)]
    while True:
        messages += [model.invoke(messages), ("user", "On.")]


def pydantic_ai() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.usage import UsageLimits

    agent = Agent(f"openai-chat:{MODEL}", tools=[noop])
    history: Any = []
    while True:
        done = agent.run_sync(TASK, message_history=history, usage_limits=UsageLimits(request_limit=MANY))
        history = done.all_messages()


def smolagents() -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    agent = ToolCallingAgent(tools=[tool(noop)], model=OpenAIModel(model_id=MODEL), max_steps=MANY)
    agent.run(TASK)


def agno() -> None:
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    agent = Agent(model=OpenAIChat(id=MODEL), tools=[noop], telemetry=False)
    while agent.run(TASK).status == "COMPLETED":
        pass


def openai_agents() -> None:
    from agents import Agent, Runner, function_tool

    agent = Agent("a", model=MODEL, tools=[function_tool(noop)])
    asyncio.run(Runner.run(agent, TASK, max_turns=MANY))


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]]()
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
    print(json.dumps({"reward": 0.5}))
