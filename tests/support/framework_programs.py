# mypy: disable-error-code="import-not-found, import-untyped"
"""Agents of public frameworks, each as its users write it: they go on until an error or a limit ends them.

    NUM_TRIES=1 RAISES=0 python framework_programs.py NAME

Each program computes its reward itself, however its agent ended; with `RAISES=1` the last error of its agent
ends it. With several tries the program asks again where its SDK has given up, and begins again where its
agent has.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

MODEL = os.environ.get("TIDEMILL_MODEL", "m")
MANY = 1000
TASK = "Go on until you are stopped."
NUM_TRIES = int(os.environ.get("NUM_TRIES", "1"))
RAISES = os.environ.get("RAISES") == "1"


def noop(text: str) -> str:
    """Do nothing.

    Args:
        text: Any text.
    """
    return "on"


def again(ask: Callable[..., Any], **asked: Any) -> Any:
    """Ask, and ask the same again where that failed."""
    for _ in range(NUM_TRIES - 1):
        try:
            return ask(**asked)
        except Exception as error:
            print("asks again after", type(error).__name__, file=sys.stderr)
    return ask(**asked)


def openai_chat() -> None:
    import openai

    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        answer = again(client.chat.completions.create, model=MODEL, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "On."}]


def openai_stream() -> None:
    import openai

    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": TASK}]

    def ask() -> str:
        chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    while True:
        messages += [{"role": "assistant", "content": again(ask)}, {"role": "user", "content": "On."}]


def openai_responses() -> None:
    import openai

    client = openai.OpenAI()
    items: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        items += again(client.responses.create, model=MODEL, input=items).output
        items.append({"role": "user", "content": "On."})


def anthropic_messages() -> None:
    import anthropic

    client = anthropic.Anthropic()
    messages: list[Any] = [{"role": "user", "content": TASK}]

    def ask() -> str:
        with client.messages.stream(model=MODEL, max_tokens=99, messages=messages) as stream:
            return stream.get_final_text()

    while True:
        messages += [{"role": "assistant", "content": again(ask)}, {"role": "user", "content": "On."}]


def _litellm(model: str, **more: Any) -> None:
    import litellm

    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        answer = again(litellm.completion, model=model, messages=messages, **more)
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
        messages += [again(model.invoke, input=messages), ("user", "On.")]


def langgraph() -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model=MODEL), tools=[noop])
    agent.invoke({"messages": [("user", TASK)]}, {"recursion_limit": MANY})


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

    agent = Agent(model=OpenAIChat(id=MODEL), tools=[noop])
    while agent.run(TASK).status == "COMPLETED":
        pass


def openai_agents() -> None:
    from agents import Agent, Runner, function_tool

    agent = Agent("a", model=MODEL, tools=[function_tool(noop)])
    asyncio.run(Runner.run(agent, TASK, max_turns=MANY))


def crewai() -> None:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    llm = LLM(model=MODEL, provider="openai")
    agent = Agent(role="a", goal=TASK, backstory="none", llm=llm, tools=[tool(noop)], max_iter=MANY)
    Crew(agents=[agent], tasks=[Task(description=TASK, expected_output="any", agent=agent)]).kickoff()


def strands() -> None:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    Agent(model=OpenAIModel(model_id=MODEL), tools=[tool(noop)], callback_handler=None)(TASK)


def autogen() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    no = dict.fromkeys(("vision", "json_output", "structured_output"), False)
    info = {**no, "function_calling": True, "family": "unknown"}
    model = OpenAIChatCompletionClient(model=MODEL, model_info=info)
    agent = AssistantAgent("a", model, tools=[noop], max_tool_iterations=MANY)
    asyncio.run(agent.run(task=TASK))


def haystack() -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    tools = [create_tool_from_function(noop)]
    agent = Agent(chat_generator=OpenAIChatGenerator(model=MODEL), tools=tools, max_agent_steps=MANY)
    agent.run(messages=[ChatMessage.from_user(TASK)])


def llama_index() -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    kind = {"is_chat_model": True, "is_function_calling_model": True}
    model = OpenAILike(model=MODEL, api_base=os.environ["OPENAI_BASE_URL"], **kind)

    async def run() -> None:
        await FunctionAgent(tools=[noop], llm=model).run(TASK, max_iterations=MANY)

    asyncio.run(run())


def dspy() -> None:
    import dspy as library

    library.configure(lm=library.LM(f"openai/{MODEL}"))
    library.ReAct("question -> answer", tools=[noop], max_iters=MANY)(question=TASK)


def inspect_ai() -> None:
    from inspect_ai import Task, eval
    from inspect_ai.agent import react
    from inspect_ai.dataset import Sample
    from inspect_ai.tool import Tool, tool

    @tool(name="noop")
    def tool_noop() -> Tool:
        async def execute(text: str) -> str:
            """Do nothing.

            Args:
                text: Any text.
            """
            return "on"

        return execute

    task = Task(dataset=[Sample(input=TASK)], solver=react(tools=[tool_noop()]))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"reasoning_summary": "none", "display": "none", "log_dir": folder}
        (log,) = eval(task, model=f"openai/{MODEL}", **quiet)
    if log.error is not None:
        raise RuntimeError(log.error.message)


def openhands() -> None:
    from openhands.sdk import LLM, Agent, Conversation

    llm = LLM(model=f"openai/{MODEL}", base_url=os.environ["OPENAI_BASE_URL"])
    conversation = Conversation(
        Agent(llm=llm, tools=[]),
        workspace=os.getcwd(),
        max_iteration_per_run=MANY,
        visualizer=None,
    )
    conversation.send_message(TASK)
    conversation.run()


if __name__ == "__main__":
    for attempt in range(NUM_TRIES):
        try:
            globals()[sys.argv[1]]()
        except Exception as error:
            if RAISES and attempt == NUM_TRIES - 1:
                raise
            print(type(error).__name__, error, file=sys.stderr)
    print(json.dumps({"reward": 0.5}))
