"""The section `servers`: who may name what."""

from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.errors import ConfigError

JUDGE: dict[str, Any] = {"judge": {"servers": "s", "template": "{{ completion }}"}}
MODEL: dict[str, Any] = {"model": {"servers": "s"}}
TEACHER: dict[str, Any] = {"teacher": {"servers": "s"}}
LOCAL: dict[str, Any] = {"model": "m", "local": {}}


@pytest.mark.parametrize(
    ("rewards", "servers", "field"),
    [
        ({"j": JUDGE}, {}, "reward.rewards.j.judge.servers"),
        ({"f": {"function": "gsm8k", "router": "x"}}, {"s": {}}, "reward.rewards.f.router"),
        ({"j": JUDGE}, {"s": {"base_urls": ["http://h:1"]}}, "servers.s"),  # a judge asks for a model by name
        ({}, {"s": {"local": {}}}, "servers.s"),  # local servers serve one
        ({}, {"a b": {}}, "servers.a b"),
        ({"j": JUDGE, "m": MODEL}, {"s": LOCAL}, "servers.s.local"),
        (
            {"one": MODEL, "all": {"model": {"servers": "s", "head": "token"}}},
            {"s": LOCAL},
            "servers.s.local",
        ),
        ({"j": JUDGE}, {"s": {"model": "m", "local": {"engine": "transformers"}}}, "servers.s.local.engine"),
        (
            {"t": {**TEACHER}},
            {"s": {"model": "m", "local": {"shares_rollout_gpus": True}}},
            "servers.s.local",
        ),
        ({}, {"s": {"base_urls": ["ftp://h"]}}, "servers.s.base_urls"),
        ({}, {"s": {"base_urls": ["http://user:secret@h"]}}, "servers.s.base_urls"),
        ({}, {"s": {"base_urls": ["http://h", "http://h"]}}, "servers.s.base_urls"),
        ({"m": {"model": {**MODEL["model"], "token_reward": "mean", "head": "token"}}}, {"s": {}}, "m.model"),
        ({"m": {"model": {**MODEL["model"], "clip": [1.0, 0.0]}}}, {"s": {}}, "m.model.clip"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(
    rewards: dict[str, Any], servers: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(reward={"rewards": rewards} if rewards else {}, servers=servers)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("rewards", "servers"),
    [
        ({"j": JUDGE, "f": {"function": "gsm8k", "router": "s"}}, {"s": LOCAL}),
        ({"a": JUDGE, "b": JUDGE}, {"s": LOCAL}),
        ({"j": JUDGE, "m": MODEL}, {"s": {"model": "m", "base_urls": ["http://h:1"]}}),
        ({"j": JUDGE, "m": MODEL}, {"s": {"model": "m", "local": {"command": ["serve"]}}}),
        ({"m": MODEL}, {"s": {}}),  # replicas may register themselves
    ],
)
def test_rewards_and_functions_share_servers(rewards: dict[str, Any], servers: dict[str, Any]) -> None:
    config = make_config(reward={"rewards": rewards}, servers=servers)
    assert {one.servers or one.router for one in config.reward.named.values()} == {"s"}


@pytest.mark.parametrize("kind", ["judge", "model", "teacher"])
def test_a_field_of_servers_in_a_reward_is_refused_with_its_place(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward.rewards.r.{kind}.base_urls.* servers.<name>.base_urls"):
        make_config(reward={"rewards": {"r": {kind: {"base_urls": ["http://h:1/v1"]}}}})
