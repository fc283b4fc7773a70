"""Losses of the user's own: what they are given, and how their mistakes are said."""

import numpy as np
import pytest

from tests.support.losses import loss_of, make_tokens
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.losses.registry import find_loss

ROLLOUT = {"old_logprobs": "rollout"}


class TestUsersOwn:
    def write(self, folder, text: str) -> str:
        (folder / "mine.py").write_text(text)
        return f"{folder / 'mine.py'}:loss"

    def test_takes_a_ratio_and_returns_the_objective_of_each_token(self, tmp_path):
        name = self.write(tmp_path, "def loss(ratio):\n    return 2 * ratio.ratio_N * ratio.advantages_N\n")
        tokens = make_tokens([0.6, 0.9], [0.4, 0.3], [1.0, -1.0])
        loss_of(tokens, loss=name, **ROLLOUT).loss.backward()
        np.testing.assert_allclose(tokens.logprobs_N.grad, [-3.0, 6.0])

    def test_may_read_the_algorithms_fields(self, tmp_path):
        text = "def loss(ratio, algorithm):\n    return algorithm.clip_high * ratio.logprobs_N\n"
        tokens = make_tokens([0.6], [0.6], [1.0])
        loss_of(tokens, loss=self.write(tmp_path, text), clip_high=7.0).loss.backward()
        np.testing.assert_allclose(tokens.logprobs_N.grad, [-7.0])

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("def loss(ratio):\n    return ratio.log_N.sum()\n", "objective of each token"),
            ("def loss(ratio):\n    return ratio.log_N.detach()\n", "without a gradient"),
            ("def loss(ratio):\n    return ratio.log_N / 0\n", "not finite"),
            ("def loss(ratio):\n    return ratio.nothing\n", "AttributeError"),
            ("def loss(logprobs):\n    return logprobs\n", "expected arguments among"),
        ],
    )
    def test_mistakes_are_found_at_the_start_and_name_the_function(self, tmp_path, text, says):
        name = self.write(tmp_path, text)
        with pytest.raises(ConfigError, match=r"trainer\.algorithm\.loss .*mine\.py:loss") as caught:
            find_loss(AlgorithmConfig(loss=name))
        assert says in str(caught.value)
