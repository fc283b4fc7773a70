"""The histories of one session, and which of them a request continues.

A client sends its whole history with each request. What becomes of it, by the kind of its `Continuation`:

* `clean`: it is a recorded history with new messages behind it. The recorded ids are extended, and nothing is
  rendered again.
* `realigned`: the same, but the text of the model's last answer differs. The ids of the common beginning are
  kept, and the client's own text follows as context. What was sampled after that is dropped: at most half of
  the answer, and at most `MAX_DRIFT_TOKENS`.
* `forked`: anything else. It becomes a new segment, rendered as a whole. The first one is `new`.

Several histories may alternate, as those of sub-agents do: each is found again by the longest match. A
history continues with any subset of the tools that its prompt describes.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from tidemill.common.wire.images import Image
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
from tidemill.services.rollout.sessions.chat import ChatFormat, num_shared
from tidemill.services.rollout.sessions.player import Decode
from tidemill.services.rollout.sessions.recorder import SegmentRecorder

if TYPE_CHECKING:
    from tidemill.services.rollout.sessions.pictures import SessionPictures

MAX_DRIFT_TOKENS = 1024
"""Most tokens of a changed answer that are dropped; with more, a fork is better."""
MIN_SHARE_KEPT = 0.5
"""Least share of the tokens of a changed answer that is kept; with less, a fork is better."""

Kind = Literal["new", "clean", "realigned", "forked"]


class Answered(NamedTuple):
    """When an answer of the model was there, and how the session would end with it."""

    at: float
    end: SessionEnd


@dataclass(eq=False)
class RecordedHistory:
    """One segment while it grows: its ids (`recorder`), and the messages that they stand for.

    Example: a prompt of one message, and the model's answer: `messages` has these two, `num_prompt_messages`
    is 1, and `answered` has one item.
    """

    recorder: SegmentRecorder
    number: int = 0
    """Counts the histories of the session in the order in which they began."""
    tools: frozenset[str] = frozenset()
    """The tools that its prompt describes."""
    text: str = ""
    """Prompt and answers of a segment without messages, as the client has them."""
    messages: list[Message] = field(default_factory=list)
    """Up to the last answer, which is the last of them. Empty before the first answer, and where the prompt
    is text or ids."""
    identities: list[Identity] = field(default_factory=list)
    """Of each message, (role, text, calls): what clients do not change, by which histories are compared."""
    num_prompt_messages: int = 0
    prefill: str = ""
    """The beginning of the first answer, if the client had written one."""
    is_closed: bool = True
    """Whether the last answer ended by itself; else what follows has to close it."""
    is_busy: bool = False
    """Whether a turn of it is being generated: nothing else can continue it."""
    answered: list[Answered] = field(default_factory=list)
    """Of each answer of the model, in order. `end` is `max_tokens` if a limit of the run cut the answer."""
    num_messages_before: int = 0
    """Length of `messages` before the last question: up to the answer before the last one."""
    last_answer: Answer | None = None

    @property
    def answered_at(self) -> float:
        return self.answered[-1].at if self.answered else 0.0

    @property
    def end(self) -> SessionEnd:
        return self.answered[-1].end if self.answered else "done"

    @property
    def turn_ids(self) -> list[int]:
        return self.recorder.completion_ids[self.recorder.turns[-1].first :]

    def hold(self, question: Question, answer: Answer) -> None:
        """Set the history to the question and its answer."""
        self.last_answer = answer
        self.num_messages_before = len(self.messages)
        if isinstance(question.prompt, str):
            self.text = question.prompt + answer.text
        if question.messages:
            asked = list(question.messages)
            message = answer.message
            if question.prefill is not None:
                # The model went on with the client's last message: both are one answer, as clients keep it.
                message = message | {"content": question.prefill + answer.text}
                asked.pop()
            if not self.num_prompt_messages:
                self.num_prompt_messages = len(asked)
                self.prefill = question.prefill or ""
            self.messages = [*asked, message]
            self.identities = [*question.identities[: len(asked)], identity(message)]

    def without_last_answer(self) -> "RecordedHistory | None":
        """A copy that ends with the answer before the last one; None where there is none before it."""
        recorder = self.recorder.without_last_turn()
        if recorder is None:
            return None
        num_messages = self.num_messages_before
        return replace(
            self,
            recorder=recorder,
            messages=self.messages[:num_messages],
            identities=self.identities[:num_messages],
            answered=self.answered[:-1],
            last_answer=None,
        )

    def begins_with(self, asked: Sequence[Identity]) -> bool:
        """Whether its first messages are these; False where a question has no messages."""
        return bool(asked) and _begins(self.identities, asked)

    def may_have_lost_end(self, asked: Sequence[Identity]) -> bool:
        """Whether the client asks with only a beginning of the last answer: with its text cut off, or without
        its calls. It may also be the answer of another history (`Histories.has_lost_end`)."""
        index = len(self.identities) - 1
        if index < 0 or len(asked) <= index or not _begins(asked, self.identities[:index]):
            return False
        role, theirs, their_calls = asked[index]
        _, ours, our_calls = self.identities[index]
        # Calls are sent last: a client that has one has received all of the text.
        if role != "assistant" or their_calls or not ours.startswith(theirs):
            return False
        return bool(our_calls) or len(theirs) < len(ours)


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a history continues: with `num_kept` tokens of its completion, then `context`, then the model."""

    kind: Kind
    history: RecordedHistory
    num_kept: int
    context: list[int]
    context_images: tuple[Image, ...] = ()
    """Pictures of the context, with their places in the segment."""

    @property
    def images(self) -> list[Image]:
        """Pictures of `ids`."""
        return [*self.history.recorder.images_within(self.num_kept), *self.context_images]

    @property
    def ids(self) -> list[int]:
        recorder = self.history.recorder
        return recorder.prompt_ids + recorder.completion_ids[: self.num_kept] + self.context

    @property
    def num_added(self) -> int:
        """Tokens by which the completion grows before the model speaks."""
        return self.num_kept + len(self.context) - len(self.history.recorder.completion_ids)

    def record(self, generation: Generation, engine_s: float) -> None:
        recorder = self.history.recorder
        if self.num_kept < len(recorder.completion_ids):
            recorder.rewind(self.num_kept)
        recorder.add_context(self.context, self.context_images)
        recorder.add_turn(generation, engine_s)


class Histories:
    """All segments of one session; `all` has them in the order in which they began."""

    def __init__(self, chat: ChatFormat, decode: Decode, pictures: "SessionPictures | None" = None) -> None:
        """`pictures` are those of the run, where it has some."""
        self._pictures = pictures
        self._chat = chat
        self._decode = decode
        self.all: list[RecordedHistory] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(history.recorder.completion_ids) for history in self.all)

    @property
    def recorded(self) -> list[RecordedHistory]:
        """Histories with an answer of the model, in the order of their last answers."""
        return in_order(history for history in self.all if history.recorder.turns)

    def find(self, question: Question) -> Continuation:
        """Find the history that the question continues, or begin one.

        Raises:
            RequestError: the chat template refuses the messages.
        """
        # May run on a thread: `list` copies at once, for the event loop may remove histories meanwhile.
        if question.prompt is not None:
            return self._find_text(question.prompt)
        candidates = [
            h for h in list(self.all) if h.identities and not h.is_busy and question.tool_keys <= h.tools
        ]
        # The longest first: by a shorter match the same question would fork a history again each time. Of
        # equal ones the newest: where the same was asked again, the client has the later answer.
        candidates.sort(key=lambda history: (len(history.identities), history.answered_at), reverse=True)
        continuation = self._find_clean(candidates, question) or self._find_realigned(candidates, question)
        if continuation is not None:
            return continuation
        try:
            ids = self._chat.render(question.messages, question.tools)
            return self._begun(*self._expanded(ids, question.messages, 0), question.tool_keys)
        except ValueError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from None

    def _find_clean(self, candidates: Sequence[RecordedHistory], question: Question) -> Continuation | None:
        """The continuation of the first history with which the question begins."""
        for history in candidates:
            num_recorded = len(history.identities)
            has_new = len(question.identities) > num_recorded
            if not has_new or not _begins(question.identities, history.identities):
                continue
            new = question.messages[num_recorded:]
            try:
                # Only what follows is rendered: ids of the past stay those that were sampled.
                context = self._chat.extend(history.turn_ids, history.is_closed, new, question.tools)
                context, images = self._expanded(context, new, len(history.recorder.ids))
            except ValueError:  # the template cannot render the new messages there
                continue
            return Continuation("clean", history, len(history.recorder.completion_ids), context, images)
        return None

    def _find_realigned(
        self, candidates: Sequence[RecordedHistory], question: Question
    ) -> Continuation | None:
        """The realigned continuation that keeps the most ids; of several, that of the first candidate."""
        longest: Continuation | None = None
        most_kept = 0
        for history in candidates:
            continuation = self._realigned(history, question)
            if continuation is None:
                continue
            num_kept = len(continuation.ids) - len(continuation.context)
            if longest is None or num_kept > most_kept:
                longest = continuation
                most_kept = num_kept
        return longest

    def _expanded(
        self, ids: list[int], messages: Sequence[Message], first: int
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Rendered ids with all tokens of the messages' pictures, and these pictures. `first` ids come before
        them in the segment. Raises ValueError: the template has not written a place for each picture."""
        return (ids, ()) if self._pictures is None else self._pictures.expand(ids, messages, first)

    def has_lost_end(self, history: RecordedHistory, asked: tuple[Identity, ...]) -> bool:
        """Whether the client asks with only a beginning of the history's last answer, which is not the answer
        of another history."""
        is_branch = self._is_branch(history, asked[: len(history.identities)])
        return history.may_have_lost_end(asked) and not is_branch

    def _find_text(self, prompt: str | list[int]) -> Continuation:
        """`find` for a prompt without messages: text or ids that continue a segment at its end."""
        candidates = [h for h in list(self.all) if not h.identities and not h.is_busy and h.last_answer]
        for history in sorted(candidates, key=lambda history: len(history.recorder.ids), reverse=True):
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
        ids = self._chat.encode(prompt) if isinstance(prompt, str) else prompt
        return self._begun(ids, (), frozenset())

    def _begun(self, prompt_ids: list[int], images: tuple[Image, ...], tools: frozenset[str]) -> Continuation:
        if not prompt_ids:
            raise RequestError("the prompt is empty")
        kind: Kind = "forked" if self.all else "new"
        return Continuation(kind, RecordedHistory(SegmentRecorder(prompt_ids, images), tools=tools), 0, [])

    def _realigned(self, history: RecordedHistory, question: Question) -> Continuation | None:
        """The continuation if only the text of the last answer differs, and begins as sampled; else None."""
        asked = question.identities
        index = len(history.identities) - 1  # of the last answer
        if len(asked) <= index or not _begins(asked, history.identities[:index]):
            return None
        role, _, calls = asked[index]
        _, ours, our_calls = history.identities[index]
        if role != "assistant" or calls or our_calls or self._is_branch(history, asked[: index + 1]):
            return None
        turn_ids = history.turn_ids
        theirs = question.messages[index]["content"].lstrip()
        num_shared_ids, added = self._shared(history, turn_ids, ours, theirs)
        if num_shared_ids < max(MIN_SHARE_KEPT * len(turn_ids), len(turn_ids) - MAX_DRIFT_TOKENS, 1):
            return None
        context = self._chat.encode(added) if added else []
        num_kept = history.recorder.turns[-1].first + num_shared_ids
        images: tuple[Image, ...] = ()
        new = question.messages[index + 1 :]
        if new:
            try:
                # As a turn that did not end: the token that ended it is not among those that are kept.
                ending = self._chat.extend(turn_ids[:num_shared_ids] + context, False, new, question.tools)
                first = len(history.recorder.prompt_ids) + num_kept + len(context)
                ending, images = self._expanded(ending, new, first)
            except ValueError:
                return None
            context += ending
        return Continuation("realigned", history, num_kept, context, images)

    def _is_branch(self, history: RecordedHistory, asked: tuple[Identity, ...]) -> bool:
        """Whether another history begins with what was asked: then it is a branch of that one, and no changed
        answer of `history`, however similar."""
        # A copy, as in `find`: a history that is removed meanwhile must not hide the one behind it.
        return any(_begins(branch.identities, asked) for branch in list(self.all) if branch is not history)

    def _shared(
        self, history: RecordedHistory, turn_ids: list[int], ours: str, theirs: str
    ) -> tuple[int, str]:
        """How many tokens of the turn the client's text shares, and the rest of that text.

        Of the turn "<think>low</think>It is 50", whose answer is `ours`, a client has `theirs`, "It is 75":
        the tokens up to "It is " are shared, and the rest is "75". What comes before the answer in the turn,
        such as thinking, counts as shared: clients drop it.
        """
        assert history.last_answer is not None
        said = history.last_answer.text.strip()
        text = self._decode(turn_ids)
        position = text.rfind(said)
        if position < 0:  # a parser has made it of what was sampled
            return 0, ""
        # Where `ours` begins in `text`; negative if the client has written its beginning (`prefill`).
        start = position - (len(ours) - len(said))
        num_common = num_shared(ours, theirs)
        if num_common == len(ours):
            # Nothing of the answer is dropped, only the token that ended the turn, where one did.
            is_ended = history.is_closed and not self._decode(turn_ids[-1:])
            num_kept = len(turn_ids) - 1 if is_ended else len(turn_ids)
            behind_answer = text[start + len(ours) :]
            return num_kept, theirs[num_common:].removeprefix(behind_answer)
        num_common_chars = start + num_common
        num_kept = num_within(turn_ids, num_common_chars, self._decode) if num_common_chars > 0 else 0
        num_kept_of_theirs = len(self._decode(turn_ids[:num_kept])) - start
        if num_kept_of_theirs <= 0:
            return 0, ""
        return num_kept, theirs[num_kept_of_theirs:]


def in_order(histories: Iterable[RecordedHistory]) -> list[RecordedHistory]:
    """Histories in the order of their last answers."""
    return sorted(histories, key=lambda history: history.answered_at)


def _begins(whole: Sequence[Identity], start: Sequence[Identity]) -> bool:
    return num_shared(whole, start) == len(start)


def num_within(ids: Sequence[int], num_chars: int, decode: Decode) -> int:
    """Number of tokens at the start whose text has at most `num_chars` characters."""
    # By bisection: to decode every prefix takes quadratic time, and an answer may be long.
    return bisect_right(range(len(ids)), num_chars, key=lambda i: len(decode(ids[: i + 1])))
