"""Plays sessions as a model that knows the solution, and as one that does nothing: `tidemill check` does it.

A user's function, `rollout.environment.oracle`, takes a row and returns the turns of the first model. The
environment has to give that session a reward of 1, and the other one 0. Everything but the model is as in a
run: the program, its address, the containers, the test.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tidemill.common.config import RunConfig
from tidemill.common.data.dataset import PROMPT
from tidemill.common.errors import ConfigError, EnvironmentFaultError, MachineFaultError
from tidemill.common.process.users_code import load_users
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Lane, SamplingParams, Ticket
from tidemill.services.rollout.containers.names import SessionName
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments import build_player
from tidemill.services.rollout.environments.environment import chat_of, row_of
from tidemill.services.rollout.sessions.chat import Call, ChatFormat, Parsed, Tools, call_of
from tidemill.services.rollout.sessions.parts import Recording
from tidemill.services.rollout.sessions.picture_parts import image_of, with_rows_pictures
from tidemill.services.rollout.sessions.player import Player

if TYPE_CHECKING:
    from tidemill.services.rollout.sessions.pictures import SessionPictures

FIELD = "rollout.environment.oracle"
SAYS = "ok"
"""What a model says that does nothing, and one that knows the solution after its last turn."""
GREY_SIDE = 56
"""Width and height, in pixels, of what stands for a picture of a row."""
EXPECTED = {"the solution": 1.0, "nothing": 0.0}
"""Reward that a play has to get."""
TURNS = (
    "expected a list with what the model says, turn by turn: a text, or calls as {name of a tool: {argument: "
    "value}}"
)


class OracleChat:
    """The model's chat format, with a script in place of what it says; ids of a turn are of its number."""

    def __init__(self, inner: ChatFormat) -> None:
        self._turns: list[Parsed] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._num_said = 0
        self.has_template = inner.has_template
        self.render = inner.render
        self.extend = inner.extend
        self.shorten = inner.shorten
        self.encode = inner.encode

    def begin(self, turns: Sequence[Parsed]) -> None:
        """Begin a session with these turns; what follows is `SAYS`."""
        self._turns = list(turns)
        self._numbers.clear()
        self._num_said = 0

    def say(self) -> list[int]:
        """The ids of the next turn."""
        word = self.encode(SAYS)
        # By their length: a small vocabulary may have one id for all words that it does not know.
        ids = [*word, *word[-1:] * self._num_said]
        self._numbers[tuple(ids)] = self._num_said
        self._num_said += 1
        return ids

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), is_cut: bool = False) -> Parsed:
        number = self._numbers.get(tuple(turn_ids), len(self._turns))
        return self._turns[number] if number < len(self._turns) else text_turn(SAYS)

    def decode(self, turn_ids: Sequence[int]) -> str:
        """The text of a turn."""
        return str(self.parse(turn_ids).message["content"])


async def play_oracle(
    config: RunConfig, rows: Sequence[Mapping[str, Any]], chat: ChatFormat, run_uid: str
) -> list[str]:
    """Play each row with its solution, and with nothing. Returns lines that describe it. The names of
    containers have `run_uid`, which no run has.

    Raises:
        ConfigError: a reward is not as expected, for these rows; or a session cannot be played.
    """
    section = config.rollout.environment
    oracle = load_users(FIELD, section.oracle, "function")
    changed = section.model_copy(update={"attempts": 1})
    rollout = config.rollout.model_copy(update={"environment": changed})
    script = OracleChat(chat)
    folder = TemporaryDirectory()
    player = build_player(
        apart(config.model_copy(update={"rollout": rollout})),
        script.decode,
        open_chat=lambda: script,
        run_dir=Path(folder.name),
    )
    problems: list[str] = []
    try:
        await player.start()
        for number, row in enumerate(rows):
            images = await stand_ins(player.pictures, row)
            ticket = make_ticket(config, row, chat, number, images)
            turns = solution_of(oracle, dict(row_of(ticket)), f"{FIELD} {section.oracle}: {row['origin']}")
            for name, said in (("the solution", turns), ("nothing", [])):
                script.begin(said)
                problem = await _problem_of(player, ticket, name, script, run_uid)
                if problem:
                    problems.append(f"{row['origin']}: {problem}")
    finally:
        await player.close()
        await player.containers.close()
        folder.cleanup()
    if problems:
        raise ConfigError(f"{FIELD} {section.oracle}: {'; '.join(problems)}")
    return [f"{FIELD} {section.oracle}: {len(rows)} rows: the solution got 1, nothing got 0"]


async def _problem_of(player: Player, ticket: Ticket, name: str, script: OracleChat, run_uid: str) -> str:
    """Play one session. Returns what is wrong with its reward, if something is."""

    async def ask(ids: Sequence[int], sampling: SamplingParams, images: Sequence[Image] = ()) -> Generation:
        said = script.say()
        return Generation(said, [0.0] * len(said), ((0, 0),), "stop")

    session = SessionName(run_uid, Lane.EVAL, "0-0", "0", ticket.ticket, 0)
    try:
        played = await player.play(ticket, f"{name} {ticket.ticket}", Recording(ask, session=session))
    except (EnvironmentFaultError, MachineFaultError, ValueError) as error:
        return f"{name} could not be played: {error}"
    reward = played.session.reward if played.session is not None else None
    if reward == EXPECTED[name]:
        return ""
    reward_text = "no reward" if reward is None else f"a reward of {reward:g}"
    return f"{name} got {reward_text}, and has to get {EXPECTED[name]:g}"


def apart(config: RunConfig) -> RunConfig:
    """The same run, whose pictures go to a folder of this machine and not to the run's store."""
    return config.model_copy(update={"streams": config.streams.model_copy(update={"claim_check_url": ""})})


async def stand_ins(pictures: "SessionPictures | None", row: Mapping[str, Any]) -> list[Image]:
    """A grey picture in the place of each one of the row: nobody looks at them here."""
    if pictures is None:
        return []
    from PIL import Image as PilImage

    file = io.BytesIO()
    PilImage.new("RGB", (GREY_SIDE, GREY_SIDE), (128, 128, 128)).save(file, "PNG")
    reference = await pictures.take(file.getvalue())
    return [image_of(reference, 0, 1)] * int(row.get("num_images", 0))


def make_ticket(
    config: RunConfig,
    row: Mapping[str, Any],
    chat: ChatFormat,
    number: int = 0,
    images: Sequence[Image] = (),
) -> Ticket:
    """A row's ticket as the trainer issues it, except that `prompt_ids` lack the run's system prompt and
    suffix, and have one token for each of `images`."""
    prompt = row["prompt"]
    is_text = isinstance(prompt, str)
    messages = chat_of(prompt)
    if config.images is not None:
        messages = [*with_rows_pictures(messages, images)]
    prompt_ids = chat.render(messages)
    return Ticket(
        ticket=number,
        step=0,
        min_version=0,
        group_size=1,
        prompt_ids=prompt_ids,
        # In the first places: no engine looks where they are.
        images=tuple(image.model_copy(update={"first": number}) for number, image in enumerate(images)),
        prompt_text=prompt if is_text else "",
        data_source=row["data_source"],
        ground_truth=row["ground_truth"],
        extra=dict(row["extra"]) | ({} if is_text else {PROMPT: prompt}),
        sampling=SamplingParams(max_tokens=config.rollout.sampling.max_tokens),
    )


def solution_of(oracle: Callable[..., Any], row: dict[str, Any], where: str) -> list[Parsed]:
    """The turns that the user's function returns for a row; `where` names both in errors.

    Raises:
        ConfigError: it raises, or returns something else.
    """
    try:
        turns = oracle(row)
    except Exception as error:
        raise ConfigError(f"{where}: it raised {type(error).__name__}: {error}") from error
    if not isinstance(turns, list | tuple):
        raise ConfigError(f"{where}: it returned {turns!r:.200}; {TURNS}")
    return [_turn_of(turn, where) for turn in turns]


def _turn_of(turn: Any, where: str) -> Parsed:
    if isinstance(turn, str):
        return text_turn(turn)
    is_calls = isinstance(turn, Mapping) and all(isinstance(value, Mapping) for value in turn.values())
    if not turn or not is_calls:
        raise ConfigError(f"{where}: it returned the turn {turn!r:.200}; {TURNS}")
    calls = tuple(Call(str(name), dict(arguments)) for name, arguments in turn.items())
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for number, call in enumerate(calls):
        try:
            arguments = json.dumps(call.arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}: it returned the turn {turn!r:.200}, whose arguments JSON cannot have: {error}"
            ) from error
        message["tool_calls"].append(call_of(f"call_{number}", call.name, arguments))
    return Parsed(message, calls)


def text_turn(text: str) -> Parsed:
    """A turn without a call."""
    return Parsed({"role": "assistant", "content": text})
