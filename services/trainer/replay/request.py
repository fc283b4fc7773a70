"""What is asked of a replay, checked before anything heavy is imported."""

from collections.abc import Sequence

from common.config import RunConfig
from common.config.loading import override_config
from common.config.recorded import FIXED, changed_fields
from common.errors import ConfigError
from common.history import History, StreamName
from common.streams import Entry
from common.wire.messages import Commit

OTHER_PARAMETERS = {
    "trainer.lora": "other parameters would be trained than those of the run's checkpoints",
    "trainer.algorithm.value.head": "other parameters would be trained than those of the run's checkpoints",
    "trainer.num_ranks": "a what-if is computed in one process",
}
"""Field or section -> why a step cannot be replayed with it changed, besides those that no run can change."""


def changed_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with the overrides.

    Raises:
        ConfigError: a field is bad, or a change would have led to other records.
    """
    changed = override_config(config, [_of_whole_section(override) for override in overrides])
    refused = FIXED | OTHER_PARAMETERS
    for change in changed_fields(config, changed):
        reason = next((why for name, why in refused.items() if _is_in(change.field, name)), "")
        if not change.field.startswith("trainer."):
            reason = "what was collected would have been something else"
        if reason:
            raise ConfigError(f"--set {change.field}: a step cannot be replayed with that: {reason}.")
    if config.trainer.num_ranks > 1:
        raise ConfigError(
            f"the run trains on {config.trainer.num_ranks} ranks: it can be replayed with as many, but --set "
            "does not work there."
        )
    return changed


def _of_whole_section(override: str) -> str:
    """A preset fills in what is not given, and a run's config gives all: it takes the whole section."""
    name, _, value = override.partition("=")
    is_preset = name.strip() == "trainer.algorithm.preset"
    return f"trainer.algorithm={{preset: {value}}}" if is_preset else override


async def check_committed(history: History, steps: Sequence[int]) -> None:
    """Make sure that the run has made these steps.

    Raises:
        ConfigError: it has no commit of one of them.
    """
    for step in steps:
        if await history.commit(step) is None:
            last = await _last_step(history)
            has = f"its commits end with step {last}" if last >= 0 else "it has no commits"
            raise ConfigError(f"run {history.run_id} has no commit of step {step}: {has}.")


async def _last_step(history: History) -> int:
    async for record in history.scan(StreamName.COMMITS, newest_first=True):
        if isinstance(record, Entry) and isinstance(record.message, Commit):
            return record.message.step
    return -1


def _is_in(field: str, section: str) -> bool:
    return field == section or field.startswith(section + ".")
