"""Checks that all which sees the prompts of a run with pictures sees the pictures, too."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidemill.common.config.environment import OPENENV
from tidemill.common.config.reward import NamedRewardConfig
from tidemill.common.config.section import Rules
from tidemill.common.config.servers import ServersConfig

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig

SEEING_PROMPTS = ("judge", "model")
"""Kinds of rewards that get the pictures of a prompt, and none that a session shows later."""


def find_problems(run: "RunConfig") -> Rules:
    trainer = run.trainer
    if run.images is None:
        if trainer.train_tower:
            yield (
                "trainer.train_tower needs the section images: without pictures a tower has no gradient; "
                "add `images: {}`, or leave it out"
            )
        return
    environment = run.rollout.environment
    if environment.use.startswith(OPENENV):
        yield (
            f"images: rollout.environment.use is {environment.use}, and the observations of OpenEnv's "
            "servers are read as text: a picture in one would not be seen. Write a class that asks the "
            "server, or leave out `images`"
        )
    if not environment.is_single_turn and not run.rollout.engine_traits.loads_model:
        yield (
            "images: tokens of pictures that a session shows are counted by the model's processor, and "
            f"rollout.engine {run.rollout.engine} loads no model; take transformers or vllm"
        )
    for name, reward in run.reward.named.items():
        problem = blind_because(reward, run.servers)
        if problem:
            yield f"images: reward.rewards.{name} would score without the pictures: {problem}"
        elif not environment.is_single_turn and reward.kind in SEEING_PROMPTS:
            yield (
                f"images: reward.rewards.{name} would score sessions without the pictures of later "
                "turns, as judges and reward models get those of the prompt alone. Take a function, or "
                "the environment's own reward"
            )
    if run.data.chat_template == "never":
        yield (
            "images: the places of pictures are written by the chat template, and data.chat_template is "
            "never; take auto"
        )


def blind_because(reward: NamedRewardConfig, servers: Mapping[str, ServersConfig]) -> str:
    """Why a reward that asks a model would not get the pictures of a prompt; empty where it would."""
    if reward.teacher:
        return "teachers get none; take a function, a judge or a reward model"
    if reward.judge and reward.judge.api == "completions":
        return "judge.api is completions, which takes text alone; take chat"
    if reward.model and reward.model.input != "chat":
        return f"model.input is {reward.model.input}, which has none; take chat"
    local = servers[reward.servers].local if reward.servers in servers else None
    if reward.model and local and not local.command and local.engine != "vllm":
        return (
            "this project's server of reward models takes text alone; give "
            f"servers.{reward.servers}.local.engine: vllm, or base_urls"
        )
    return ""
