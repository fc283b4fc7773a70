"""A trainer that is asked to stop."""

from types import SimpleNamespace
from typing import Any

from tidemill.common.process.service import StoppedError
from tidemill.services.trainer.trainer import Trainer


async def test_it_ends_as_asked_where_the_disk_refuses_its_last_checkpoint() -> None:
    num_tried = 0

    async def refuse() -> None:
        nonlocal num_tried
        num_tried += 1
        raise StoppedError

    async def do_nothing(*_: Any) -> None: ...

    trainer: Any = SimpleNamespace(
        weights_work=SimpleNamespace(give_up=do_nothing),
        _evaluation=None,
        runner=SimpleNamespace(
            thread=SimpleNamespace(call_anywhere=do_nothing),
            policy=SimpleNamespace(zero=None),
            has_begun=False,
        ),
        checkpointer=SimpleNamespace(finish=do_nothing),
        trained_version=2,
        version=2,
        _save=refuse,
    )
    await Trainer._stop(trainer)  # else its log would say that nothing was changed
    assert num_tried == 1
