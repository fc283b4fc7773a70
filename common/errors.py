"""The errors Tidemill raises for people: one root, few children.

Each message says what was found, what was expected and what to do. Command lines print the message
without a traceback and exit with `exit_code`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class TidemillError(Exception):
    """Root of every error that a user may see."""

    exit_code = 1


class ConfigError(TidemillError):
    """The run cannot start as configured: a bad field, dataset, model folder, reward or address."""

    exit_code = 2
    unknown_fields: tuple[str, ...] = ()
    """Dotted names in the config file that match no field."""
    guesses: Mapping[str, str] = MappingProxyType({})
    """What the message guesses of some of them, by their names: for those who know better."""


class ConfigErrors(ConfigError):
    """Several mistakes at once; its text has all of them, apart from one another by an empty line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n\n".join(problems))
        self.problems = tuple(problems)


class BrokerError(TidemillError):
    """Redis cannot be used: unreachable, wrong credentials, or unsafe settings."""

    exit_code = 2


class UnreachableError(BrokerError):
    """Redis does not answer; this may be temporary."""


class OutageError(UnreachableError):
    """Redis stayed unreachable for as long as a service waits for it: no mistake, so it may start again."""

    exit_code = 1


class CodecError(TidemillError):
    """An entry of a stream cannot be decoded; its bytes belong in the dead-letter stream."""


class LeaseLostError(TidemillError):
    """The message is no longer pending for this consumer: another one works on it now."""


class WeightsError(TidemillError):
    """A version's files are missing, torn, or do not match their checksums."""


class DamagedWeightsError(WeightsError):
    """The bytes of a version differ from those that were announced: it has to be written again."""


class WeightsMismatchError(WeightsError):
    """An engine does not hold, or would not hold, what the trainer committed; a full version repairs it."""


class StoreError(TidemillError):
    """A store of objects or payloads lacks one, does not answer, or refuses the request."""


class UnreadableError(StoreError):
    """A payload cannot be read, though others in the same store can."""


class RefusedError(StoreError):
    """A store answers, and refuses the keys of this process: waiting does not change that."""


class ArchiveError(TidemillError):
    """The archive of a run is damaged, or not what its manifest says."""


class EngineError(TidemillError):
    """The generation engine failed for good; the process has to be restarted."""


class BrokenImageError(TidemillError):
    """A picture is missing, damaged, or not one that is taken: its row or sample has failed, and no other."""


class EnvironmentFaultError(TidemillError):
    """An environment could not start, did not answer in time, or died; the model is not at fault.

    `kind`, a metric's label, says what failed: start, reset, step, reward, close, timeout, program, died,
    lost (an answer has not reached the program), engine (it was slow).
    """

    def __init__(self, message: str, kind: str = "step") -> None:
        super().__init__(message)
        self.kind = kind


class MachineFaultError(TidemillError):
    """Something for a sample could not be started: the machine is short of processes, threads, descriptors,
    memory or disk (`common/process/shortage.py`).

    It says nothing of the sample: its message goes back, and the attempt is not counted. `number` is the
    `errno`.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class RewardError(TidemillError):
    """A reward could not be computed; carries the reason in plain words."""


def first_cause(error: BaseException) -> BaseException:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def text_of(error: BaseException) -> str:
    """The text of any exception; that of users' code may have a `__str__` that fails."""
    try:
        return str(error)
    except BaseException:
        return "its text cannot be read"
