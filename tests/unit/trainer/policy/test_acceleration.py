"""What cannot be had is said, and never half applied."""

import pytest
import torch

from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.model_loading import wants_liger

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_liger_is_left_out_where_it_cannot_run_and_refused_where_it_was_demanded(monkeypatch):
    assert not wants_liger("auto", CPU)
    assert not wants_liger("off", CUDA)
    with pytest.raises(ConfigError, match=r"CUDA GPUs, and the model is on cpu.*auto or off"):
        wants_liger("on", CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not wants_liger("auto", CUDA)
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[liger\]'"):
        wants_liger("on", CUDA)
