"""Every file of examples/rewards, run by a real worker, or where it asks a server, against a real server."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.misbehaving import MisbehavingServer, answers, says
from tests.support.rewards import make_sample, scores, worker
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.config import NamedRewardConfig, load_config
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.rewards.reward import make_reward

EXAMPLES = Path(__file__).parents[3] / "examples" / "rewards"
CHAT = {"prompt": [{"role": "user", "content": "1/2 + 1/2?"}], "solution": "$1$"}
THOUGHT = "<think>halves</think> <answer>1</answer>"


@pytest.mark.parametrize(
    ("reward", "texts", "extra", "values"),
    [
        (
            {"function": "plain.py:compute_score", "kwargs": {"target_words": 4}},
            ["a b c d", "a b"],
            {},
            [1.0, 0.5],
        ),
        ({"function": "components.py:compute_score"}, [THOUGHT, "1"], {}, [1.0, 0.0]),
        ({"function": "trl_format.py:format_reward"}, [THOUGHT, "1"], CHAT, [1.0, 0.0]),
        ({"function": "trl_accuracy.py:accuracy_reward"}, [r"\boxed{1}", r"\boxed{2}"], CHAT, [1.0, 0.0]),
        ({"function": "trl_async.py:brevity_reward"}, ["x", "y"], {}, [0.25, 0.25]),
        (
            {"function": "reward_class.py:RewardAgent", "kwargs": {"target_words": 4}},
            ["a b c", "a b"],
            {},
            [1.0, 2 / 3],
        ),
        (
            {
                "function": "trl_accuracy.py:accuracy_reward",
                "group": "group_ranking.py:rank_by_score_then_length",
            },
            [r"\boxed{1} it is", r"\boxed{2}", r"\boxed{1}"],
            CHAT,
            [0.5, 0.0, 1.0],
        ),
    ],
    ids=["plain", "components", "trl_format", "trl_accuracy", "trl_async", "reward_class", "group_ranking"],
)
async def test_functions(broker, keys, reward, texts, extra, values):
    paths = {name: f"{EXAMPLES}/{reward[name]}" for name in ("function", "group") if name in reward}
    async with worker(broker, keys, **(reward | paths)):
        await append(broker, keys.trajectories(), *_group(texts, extra))
        published = await scores(broker, keys, len(texts))
    assert [score.error for score in published] == [""] * len(texts)
    assert [score.value for score in published] == pytest.approx(values)


async def test_the_weighted_sum_of_the_yaml_file(broker: Broker, keys: Keys, tmp_path: Path) -> None:
    tree = yaml.safe_load((EXAMPLES / "hybrid.yaml").read_text())
    config = tmp_path / "run.yaml"  # as a part of a whole run's config, beside the functions
    config.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"train": "t"}, **tree}))
    for name in ("trl_accuracy.py", "trl_async.py", "components.py"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    section = load_config(config).reward.model_dump(mode="json")
    texts = ["<answer>$1$</answer>", "<answer>$2$</answer>", "$1$"]
    async with worker(broker, keys, **(section | {"processes": 1})):
        trajectories = [
            t.model_copy(update={"ground_truth": "$1$"}) for t in _group(texts, {"solution": "$1$"})
        ]
        await append(broker, keys.trajectories(), *trajectories)
        published = await scores(broker, keys, 3)
    assert [score.error for score in published] == [""] * 3
    assert [score.value for score in published] == [1.0, 0.0, 0.5]
    assert published[0].components["before_group"] == pytest.approx(1.0 + 0.2 + 0.1 * 0.25)
    assert {"correct", "format", "short"} <= published[0].components.keys()


def scores_like_a_server(server: MisbehavingServer, writer: Any, request: dict[str, Any]) -> Any:
    """Like a chat server, and like the server of `remote.py`; says nothing useful about `odd`."""
    if "messages" not in request:
        return says(200, {"score": 0.75})(server, writer, request)
    question = request["messages"][0]["content"]
    return answers("no idea" if "odd" in question else "I say 8.")(server, writer, request)


async def test_a_judge_over_http_through_the_routers_address(broker: Broker, keys: Keys) -> None:
    asked: list[str] = []

    class Routed(RewardDependencies):
        async def router_address(self, name: str) -> str:
            asked.append(name)
            return f"127.0.0.1:{server.port}"

    async with MisbehavingServer(scores_like_a_server) as server:
        services = Routed(make_config(), broker, keys, "w1")
        config = NamedRewardConfig(function=f"{EXAMPLES}/judge_by_router.py:compute_score", router="judge")
        reward = make_reward("mine", config, services)
        outcome = await reward.score(make_sample((0, 0), False, "", "2", "2", {"question": "1+1?"}))
        assert (outcome.value, outcome.detail, asked) == (0.8, {"verdict": "I say 8."}, ["judge"])
        with pytest.raises(AttemptError, match="no number in the verdict"):
            await reward.score(make_sample((0, 1), False, "", "odd", "2", {}))
        await reward.close()
        await services.close()


async def test_a_score_over_http(broker: Broker, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_PASS_ENV", "REWARD_SERVER_URL")
    async with MisbehavingServer(scores_like_a_server) as server:
        monkeypatch.setenv("REWARD_SERVER_URL", server.url)
        async with worker(broker, keys, function=f"{EXAMPLES}/remote.py:compute_score"):
            await append(broker, keys.trajectories(), make_trajectory(0))
            (score,) = await scores(broker, keys, 1)
    assert score.value == 0.75


def test_every_example_is_run_here() -> None:
    named = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in named] == []


def _group(texts: list[str], extra: dict[str, Any]) -> list[Any]:
    return [
        make_trajectory(0, index, text=text, group_size=len(texts), extra=extra)
        for index, text in enumerate(texts)
    ]
