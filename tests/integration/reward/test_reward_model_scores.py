"""Scores of the reward model server's model: those of a plain forward pass, whatever stands beside a row."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.support.models import tiny_model
from tests.support.reward_models import tiny_classifier, tiny_encoder, tiny_token_scorer
from tidemill.common.errors import ConfigError
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.model_server.scoring_model import ScoringModel

TOLERANCE = 1e-5
ROWS = [[5, 6, 7], [9] * 40, [3], [4, 8, 15, 16, 23], [11, 12] * 30]
MAKERS = {
    "one label": (tiny_classifier, {}, AutoModelForSequenceClassification),
    "three labels": (tiny_classifier, {"num_labels": 3}, AutoModelForSequenceClassification),
    "tokens": (tiny_token_scorer, {}, AutoModelForTokenClassification),
    "tokens, two labels": (tiny_token_scorer, {"num_labels": 2}, AutoModelForTokenClassification),
    "encoder": (tiny_encoder, {"num_labels": 2}, AutoModelForSequenceClassification),
}


def plain(model: Any, row: list[int]) -> Tensor:
    """What transformers alone says, one row at a time."""
    with torch.inference_mode():
        scores: Tensor = model(input_ids=torch.tensor([row])).logits[0].float()
        return scores


@pytest.mark.parametrize("name", MAKERS)
def test_scores_equal_a_plain_forward_pass_and_rows_do_not_see_each_other(tmp_path: Path, name: str) -> None:
    make, changes, auto = MAKERS[name]
    path = make(tmp_path / "model", **changes)
    model, reference = ScoringModel(ServerOptions(model=str(path))), auto.from_pretrained(path)
    together = model.score(ROWS)
    for row, scored, alone in zip(ROWS, together, (model.score([row])[0] for row in ROWS), strict=True):
        assert scored.dtype == torch.float32
        assert (scored - plain(reference, row)).abs().max() < TOLERANCE
        assert (scored - alone).abs().max() < TOLERANCE  # the rows beside it change nothing
    # The test can see a difference: neighbours' scores are far apart.
    assert (together[0].mean() - together[1].mean()).abs() > 100 * TOLERANCE


def test_the_last_token_counts_also_where_it_is_the_padding_id(tmp_path: Path) -> None:
    path = tiny_classifier(tmp_path / "model", pad_token_id=1, eos_token_id=1)
    model = ScoringModel(ServerOptions(model=str(path)))
    (ended,), (cut,) = model.score([[5, 6, 7, 1]]), model.score([[5, 6, 7]])
    unpadded = AutoModelForSequenceClassification.from_pretrained(path)
    unpadded.config.pad_token_id = None
    assert (ended - plain(unpadded, [5, 6, 7, 1])).abs().max() < TOLERANCE
    assert (ended - cut).abs().max() > 100 * TOLERANCE


def test_the_head_computes_in_float32_over_a_trunk_in_bfloat16(tmp_path: Path) -> None:
    path = tiny_classifier(tmp_path / "model")
    model = ScoringModel(ServerOptions(model=str(path), dtype="bfloat16"))
    (scored,) = model.score([ROWS[3]])
    reference = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16)
    weights = AutoModelForSequenceClassification.from_pretrained(path).score.weight
    with torch.inference_mode():
        hidden_H = reference.model(torch.tensor([ROWS[3]])).last_hidden_state[0, -1]
        expected = weights.bfloat16().float() @ hidden_H.float()
    assert hidden_H.dtype == torch.bfloat16
    assert (scored - expected).abs().max() < TOLERANCE
    # All in bfloat16, the score would be rounded to 8 bits.
    assert (scored.bfloat16().float() - scored).abs().max() > 0


def test_weights_go_and_come_back_unchanged(tmp_path: Path) -> None:
    model = ScoringModel(ServerOptions(model=str(tiny_classifier(tmp_path / "model")), share_device=True))
    model.restore()
    before = model.score(ROWS)
    model.offload()
    model.restore()
    assert all(torch.equal(*pair) for pair in zip(before, model.score(ROWS), strict=True))


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM; expected \.\.\.ForSequenceClassification"):
        ScoringModel(ServerOptions(model=str(path)))
    with pytest.raises(ConfigError, match=r"no weights for score\.weight: it is not a trained sequence"):
        ScoringModel(ServerOptions(model=str(path), head="sequence"))
    with pytest.raises(ConfigError, match="does not exist"):
        ScoringModel(ServerOptions(model=str(tmp_path / "nowhere")))
