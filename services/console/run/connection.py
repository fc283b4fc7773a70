"""The way to the Redis of a run. Imports little: every command that looks at a run begins with it."""

from common.errors import BrokerError, ConfigError
from common.redis.broker import Broker
from common.redis.client import URL_VARIABLE
from services.console.run.folder import RunFolder, nearest


async def connect(folder: RunFolder) -> Broker:
    """Connect to the Redis of a run, or say why there is none to connect to.

    Raises:
        TidemillError: its Redis is not known, or does not answer.
    """
    url = folder.address()
    if url is None:
        state = "it is not running now" if folder.path.is_dir() else "there is no such folder"
        raise ConfigError(
            f"run {folder.run_id}: no Redis to ask ({nearest(folder.path)}: {state}). Set {URL_VARIABLE} to "
            "the run's server, or start the run with `tidemill up`."
        )
    try:
        return await Broker.connect(url)
    except BrokerError as error:
        if not folder.address_file.exists():
            raise
        raise BrokerError(
            f"the Redis of run {folder.run_id} does not answer: its `tidemill up` was probably killed. "
            f"Continue the run with `tidemill up CONFIG --run-id {folder.run_id} --resume`. ({error})"
        ) from None
