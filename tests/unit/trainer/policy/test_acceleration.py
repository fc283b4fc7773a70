"""What cannot be had is said, and never half applied."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.model_loading import use_device, wants_liger
from tidemill.services.trainer.policy.offload import _Lanes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_liger_is_left_out_where_it_cannot_run_and_refused_where_it_was_demanded(monkeypatch):
    automatic, wanted = TrainerConfig(), TrainerConfig(liger="on")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: "found")
    assert wants_liger(automatic, CUDA)
    assert not wants_liger(automatic, CPU)
    assert not wants_liger(TrainerConfig(liger="off"), CUDA)
    assert not wants_liger(TrainerConfig(compile=True), CUDA)
    with pytest.raises(ConfigError, match=r"CUDA GPUs, and the model is on cpu.*auto or off"):
        wants_liger(wanted, CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not wants_liger(automatic, CUDA)
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[liger\]'"):
        wants_liger(wanted, CUDA)


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", 1), ("cuda", None), ("cpu", None)])
def test_a_device_that_is_named_is_the_threads_own(monkeypatch, name, expected):
    """Torch's stager of checkpoints waits for that one, whatever device a tensor is on."""
    used: list[int | None] = [None]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(device.index))
    assert use_device(name) == torch.device(name)
    assert used[-1] == expected


def test_moments_pass_by_the_stream_of_their_own_device(monkeypatch):
    """Not by that of the thread's device: the update would be another one's."""
    asked: list[torch.device] = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: MagicMock())
    monkeypatch.setattr(torch.cuda, "Event", MagicMock)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device) or MagicMock())
    like = SimpleNamespace(is_cuda=True, device=device, new_empty=torch.empty)
    with _Lanes(like, 4).passing([torch.ones(3), torch.ones(3)]) as moments:
        assert [moment.tolist() for moment in moments] == [[1.0] * 3] * 2
    assert asked == [device] * 3
