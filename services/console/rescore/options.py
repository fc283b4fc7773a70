"""The folder, the config and the history of a sandbox run, from the options of `tidemill rescore`."""

import itertools
from pathlib import Path

from tidemill.common.config import RunConfig, load_config, override_config
from tidemill.common.errors import ConfigError
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.wire.keys import RUN_ID
from tidemill.common.wire.messages import Lane
from tidemill.services.console.options import RescoreOptions
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.history import RunAccess


def sandbox_folder(options: RescoreOptions, source: RunFolder) -> RunFolder:
    """The sandbox's folder: the name that was given, else the first that is free."""
    names = [options.into] if options.into else (f"{source.run_id}.rescore-{n}" for n in itertools.count(1))
    for name in names:
        if not RUN_ID.fullmatch(name):
            raise ConfigError(
                f"--into {name!r} must be 1 to 100 letters, digits, '.', '_' or '-', beginning with a "
                "letter or digit"
            )
        folder = RunFolder(source.runs, name)
        if not folder.path.exists():
            return folder
    raise ConfigError(f"{folder.path} is there already; give the sandbox another name with --into.")


def sandbox_config(options: RescoreOptions, source: RunAccess, run_id: str) -> RunConfig:
    """The run's config with another reward, by `--reward`, `--config` or `--set`.

    Raises:
        ConfigError: the run's config is not known, or what was given does not fit.
    """
    config = source.config
    if config is None:
        raise ConfigError(f"the config of run {source.run_id} is neither in Redis nor in its folder.")
    if options.reward and options.config:
        raise ConfigError("give either --reward, for a function, or --config, for a whole reward section")
    reward = config.reward
    if options.config:
        reward = load_config(options.config).reward
    elif options.reward:
        file, colon, name = (
            options.reward.rpartition(":") if ".py:" in options.reward else (options.reward, "", "")
        )
        path = f"{Path(file).resolve()}{colon}{name}" if colon else options.reward
        kept = {name: getattr(reward, name) for name in ("timeout_s", "max_attempts", "backoff_s")}
        kept |= {name: getattr(reward, name) for name in ("max_in_flight", "processes", "workers")}
        reward = type(reward).model_validate({"function": path, **kept})
    # A run whose reward workers are started apart has none in its config; a sandbox needs one of its own.
    reward = reward.model_copy(update={"workers": options.workers or max(1, reward.workers)})
    config = config.model_copy(update={"run_id": run_id, "reward": reward})
    return override_config(config, options.overrides)


async def require_history(history: History, selection: Selection, lane: Lane) -> None:
    """Refuse a stretch that holds nothing, before anything is started."""
    async for _ in history.scan(StreamName.TRAJECTORIES.of(lane), selection):
        return
    raise ConfigError(
        f"run {history.run_id} has no {lane} trajectories in that stretch. `tidemill streams show "
        f"{history.run_id}` shows what there is."
    )
