"""How ranks meet: how long they wait for each other, and who may read them."""

import subprocess
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tidemill.services.trainer.policy.fsdp import ranks
from tidemill.services.trainer.policy.fsdp.ranks import JOIN_TIMEOUT, NCCL_TIMEOUT, Ranks, join_ranks

VARIABLES = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Torch's calls, on a machine with a GPU."""
    calls = MagicMock(PrefixStore=lambda _, store: store)
    calls.rendezvous = lambda *_, timeout: iter([(timeout, 0, 4)])
    calls.new_subgroups_by_enumeration = lambda parts, timeout: ((parts, timeout), [])
    monkeypatch.setattr(ranks, "dist", calls)
    monkeypatch.setattr(ranks, "rendezvous", calls.rendezvous, raising=False)
    for name, answer in {"is_available": True, "device_count": 8, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return calls


def test_ranks_wait_longer_for_one_that_still_loads_than_for_one_that_hangs(group: MagicMock) -> None:
    join_ranks(VARIABLES)
    _, options = group.init_process_group.call_args
    assert options["timeout"] == NCCL_TIMEOUT < JOIN_TIMEOUT == options["store"]


def test_ranks_that_share_a_copy_wait_no_longer_for_each_other_than_all_do(
    group: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mesh_of(groups: list[tuple[Any, timedelta]], *_: Any, **__: Any) -> Any:
        return groups

    monkeypatch.setattr(ranks.DeviceMesh, "from_group", mesh_of)
    joined = Ranks(3, 4, torch.device("cuda", 3))
    joined.lay_out(2)
    assert joined.mesh == [([[0, 2], [1, 3]], NCCL_TIMEOUT), ([[0, 1], [2, 3]], NCCL_TIMEOUT)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep processes apart by other means")
def test_a_rank_is_hidden_from_other_processes_of_its_user() -> None:
    program = (
        "import ctypes, os\n"
        "from tidemill.services.trainer.policy.fsdp import rank_main\n"
        "rank_main.join_ranks = lambda: exit(ctypes.CDLL(None).prctl(3))\n"
        "rank_main.main(os.getppid())"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
