"""The histories of one session, and which of them a request continues.

A client sends its whole history every time. Where it is what was recorded, and new messages, the recorded
ids are extended and nothing is rendered again (clean). Where only the model's last answer differs, in less
than `MAX_DRIFT_TOKENS`, that answer is cut where it differs and the client's version follows as context
(realigned). Anything else is a segment of its own, whole and rendered anew (forked). Several histories may
take turns, as those of sub-agents do: each is found again by the longest match.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tidemill.common.wire.segments import SessionEnd
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.gateway.dialogue import (
    Answer,
    Identity,
    Message,
    Question,
    RequestError,
    identity,
)
from tidemill.services.rollout.sessions.chat import ChatFormat
from tidemill.services.rollout.sessions.recorder import SegmentRecorder

MAX_DRIFT_TOKENS = 1024

Kind = Literal["new", "clean", "realigned", "forked"]


@dataclass(eq=False)
class History:
    """One segment while it grows, and the messages that it holds."""

    recorder: SegmentRecorder
    tools_key: str = ""
    text: str = ""
    """Of a segment without messages: prompt and answers, as the client has them."""
    messages: list[Message] = field(default_factory=list)
    identities: list[Identity] = field(default_factory=list)
    num_prompt_messages: int = 0
    is_closed: bool = True
    """Whether the last answer ended by itself; else what follows has to close it."""
    is_busy: bool = False
    """A turn of it is being generated: nothing else can continue it."""
    answered_at: float = 0.0
    end: SessionEnd = "done"
    """How the session would end with its last answer: `max_tokens` where a limit of the run cut that."""
    last_answer: Answer | None = None

    def hold(self, question: Question, answer: Answer) -> None:
        """The history is what was asked and answered now."""
        self.last_answer = answer
        if isinstance(question.prompt, str):
            self.text = question.prompt + answer.text
        if question.messages:
            self.num_prompt_messages = self.num_prompt_messages or len(question.messages)
            self.messages = [*question.messages, answer.message]
            self.identities = [identity(message) for message in self.messages]


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a history goes on: `num_kept` tokens of its completion, then `context`, then the model."""

    kind: Kind
    history: History
    num_kept: int
    context: list[int]

    @property
    def ids(self) -> list[int]:
        """What the engine continues."""
        recorder = self.history.recorder
        return recorder.prompt_ids + recorder.completion_ids[: self.num_kept] + self.context

    @property
    def num_added(self) -> int:
        """Tokens by which the completion grows before the model speaks."""
        return self.num_kept + len(self.context) - len(self.history.recorder.completion_ids)

    def record(self, generation: Generation, engine_s: float) -> None:
        """The model has spoken."""
        recorder = self.history.recorder
        if self.num_kept < len(recorder.completion_ids):
            recorder.rewind(self.num_kept)
        recorder.add_context(self.context)
        recorder.add_turn(generation, engine_s)


class Histories:
    """All segments of one session; `all` has them in the order in which they began."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.all: list[History] = []

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all segments."""
        return sum(len(history.recorder.completion_ids) for history in self.all)

    @property
    def recorded(self) -> list[History]:
        """Those in which the model has spoken, in the order of their last answers."""
        spoken = [history for history in self.all if history.recorder.turns]
        return sorted(spoken, key=lambda history: history.answered_at)

    def find(self, question: Question) -> Continuation:
        """How the history that the question continues goes on.

        Raises:
            RequestError: the chat template refuses the messages.
        """
        if question.prompt is not None:
            return self._find_text(question.prompt)
        asked = question.identities
        known = [h for h in self.all if h.identities and not h.is_busy and h.tools_key == question.tools_key]
        known.sort(key=lambda history: len(history.identities), reverse=True)
        for history in known:
            goes_on = len(asked) > len(history.identities) and _begins(asked, history.identities)
            if goes_on and (continuation := self._extended(history, question)) is not None:
                return continuation
        for history in known:
            if (continuation := self._realigned(history, question, asked)) is not None:
                return continuation
        return self._begun(self._rendered(question.messages, question), question.tools_key)

    def _find_text(self, prompt: str | list[int]) -> Continuation:
        """The same for a prompt without messages: text or ids that go on where a segment ended."""
        known = [h for h in self.all if not h.identities and not h.is_busy and h.last_answer]
        for history in sorted(known, key=lambda history: len(history.recorder.ids), reverse=True):
            ids = history.recorder.ids
            context: list[int] = []
            if isinstance(prompt, str) and history.text and prompt.startswith(history.text):
                context = self._chat.encode(prompt[len(history.text) :])
                if context[:1] == ids[-1:]:  # the end of a turn, which the model has written itself
                    del context[0]
            elif not isinstance(prompt, str) and prompt[: len(ids)] == ids:
                context = prompt[len(ids) :]
            if context:
                return Continuation("clean", history, len(history.recorder.completion_ids), context)
        return self._begun(self._chat.encode(prompt) if isinstance(prompt, str) else prompt, "")

    def _begun(self, prompt_ids: list[int], tools_key: str) -> Continuation:
        if not prompt_ids:
            raise RequestError("the prompt is empty")
        kind: Kind = "forked" if self.all else "new"
        return Continuation(kind, History(SegmentRecorder(prompt_ids), tools_key), 0, [])

    def _extended(self, history: History, question: Question) -> Continuation | None:
        """None where the template cannot render the new messages there."""
        recorder = history.recorder
        last = recorder.turns[-1]
        new = question.messages[len(history.identities) :]
        turn_ids = recorder.completion_ids[last.first :]
        try:
            context = self._chat.extend(turn_ids, history.is_closed, new, question.tools)
        except ValueError:
            return None
        return Continuation("clean", history, len(recorder.completion_ids), context)

    def _realigned(
        self, history: History, question: Question, asked: tuple[Identity, ...]
    ) -> Continuation | None:
        """None unless the last answer alone is another one, and begins as what was sampled."""
        num_before = len(history.identities) - 1
        is_last = len(asked) > num_before + 1 and _begins(asked, history.identities[:num_before])
        if not is_last or asked[num_before][0] != "assistant":
            return None
        changed = dict(question.messages[num_before])
        if reasoning := history.messages[-1].get("reasoning_content"):
            changed.setdefault("reasoning_content", reasoning)  # clients drop it; the model did say it
        before = self._rendered(question.messages[:num_before], question)
        messages = [*question.messages[:num_before], changed, *question.messages[num_before + 1 :]]
        whole = self._rendered(messages, question)
        if whole[: len(before)] != before:
            return None
        theirs = whole[len(before) :]
        ours = history.recorder.completion_ids[(first := history.recorder.turns[-1].first) :]
        num_common = num_shared(ours, theirs)
        if not num_common or len(ours) - num_common >= MAX_DRIFT_TOKENS or num_common == len(theirs):
            return None
        return Continuation("realigned", history, first + num_common, theirs[num_common:])

    def _rendered(self, messages: Sequence[Message], question: Question) -> list[int]:
        try:
            return self._chat.render(messages, question.tools)
        except ValueError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from None


def _begins(whole: Sequence[Identity], start: Sequence[Identity]) -> bool:
    return num_shared(whole, start) == len(start)


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Items at the start of both."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
