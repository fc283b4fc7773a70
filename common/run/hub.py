"""The hub of Hugging Face: what is asked of it says so at once where it does not answer."""

from contextlib import AbstractContextManager

from tidemill.common.errors import ConfigError
from tidemill.common.waiting import said_while_waiting

FIRST_LINE_S = 5.0
TIMEOUT_S = 5.0
REMEDY = (
    "HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy; with HF_HUB_OFFLINE=1 only what is in this machine's "
    "cache (HF_HOME) is read"
)


def told_while_waiting(subject: str, first_s: float = FIRST_LINE_S) -> AbstractContextManager[None]:
    """Say on stderr that `subject` waits for the hub: after `first_s`, and each time it has waited twice as
    long. The hub's library tries again for more than a minute, in silence."""
    return said_while_waiting(
        lambda waited_s: f"{subject}: waiting for the hub for {waited_s:g} s. {REMEDY}.", first_s
    )


def check_model_on_hub(name: str, timeout_s: float = TIMEOUT_S) -> None:
    """Find out within seconds that a model can be had: from the cache, or from the hub.

    Raises:
        ConfigError: it is in no cache, and the hub does not have it, refuses it or does not answer.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    where = f"model.path {name} is a hub name, and not in this machine's cache"
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{where}, and HF_HUB_OFFLINE is set. Unset it, or give the folder of a Hugging Face model."
        )
    try:
        HfApi().model_info(name, timeout=timeout_s)
    except GatedRepoError:
        raise ConfigError(
            f"{where}. The hub has it for those alone who have accepted its terms: accept them on its page, "
            "and set HF_TOKEN."
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{where}. The hub at {constants.ENDPOINT} has no such model, or not for you: check the name "
            "(OWNER/NAME), or set HF_TOKEN. For a folder, give its path from the config's folder, or a whole "
            "path."
        ) from None
    except Exception as error:  # the library passes on what its HTTP client raises
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"{where}. The hub at {constants.ENDPOINT} does not answer ({reason}). Give the folder of a "
            f"Hugging Face model, or try again: {REMEDY}."
        ) from None
