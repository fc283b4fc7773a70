"""What judges and reward models will read of a row.

`tidemill check` shows it, so that nobody has to guess which template went around what.
"""

from pathlib import Path
from typing import Any

from common.chat_template import ChatTemplate, RenderError
from common.config import NamedRewardConfig, RewardConfig
from common.dataset import PROMPT
from services.reward.outcome import AttemptError
from services.reward.remote.local_replicas import template_file
from services.reward.remote.template import JudgePrompt
from services.reward.sample import ChatMessages, Sample

COMPLETION = "(the completion)"
TEMPLATED = "(the prompt in the policy's chat template)"


def readings(config: RewardConfig, row: dict[str, Any]) -> dict[str, str]:
    """By the reward's name, the text of a request about this row; rewards without servers are left out."""
    prompt = row["prompt"]
    extra = dict(row["extra"]) | ({PROMPT: prompt} if isinstance(prompt, list) else {})
    own = prompt if isinstance(prompt, str) else ""
    sample = Sample(
        (0, 0), False, row["data_source"], COMPLETION, row["ground_truth"], extra, TEMPLATED, own_text=own
    )
    asked = {
        name: reward
        for name, reward in config.named.items()
        if reward.remote is not None and (not reward.applies_to or sample.data_source in reward.applies_to)
    }
    texts = {name: _reading(name, reward, sample) for name, reward in asked.items()}
    return {name: text for name, text in texts.items() if text}


def _reading(name: str, reward: NamedRewardConfig, sample: Sample) -> str:
    if reward.judge is not None:
        if reward.judge.router_only:
            return ""
        try:
            messages = JudgePrompt(name, reward.judge).messages(sample)
        except AttemptError as error:
            return str(error)
        return _lines(messages) if reward.judge.api == "chat" else messages[-1]["content"]
    assert reward.model is not None
    if reward.model.input == "ids":
        return "the token ids that the policy read and wrote"
    if reward.model.input == "text":
        return sample.prompt_text + sample.solution_str
    return _rendered(reward, sample.conversation)


def _rendered(reward: NamedRewardConfig, messages: ChatMessages) -> str:
    """In the reward model's template where that is on this machine, else as messages."""
    local = reward.local_replicas
    if local is not None and not local.command and Path(local.model).is_dir():
        template = ChatTemplate.of(Path(local.model), template_file(reward))
        try:
            if template is not None:
                return template.render(messages, add_generation_prompt=False)
        except RenderError as error:
            return f"{error}: {_lines(messages)}"
    return _lines(messages)


def _lines(messages: ChatMessages) -> str:
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
