"""Keeps a session's tokens as they were sampled: nothing is ever rendered or tokenized again.

A history only grows: the engine's tokens (mask 1, with their logprobs and versions) and the environment's
(mask 0). A history that does not continue it becomes a segment of its own.
"""

import copy
from collections.abc import Sequence

import numpy as np

from tidemill.common.wire.choices import KEPT, ROUTES, Rows
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import SamplingParams
from tidemill.common.wire.segments import Segment, Turn, VersionSpan
from tidemill.services.rollout.engines.engine import Generation


class SegmentRecorder:
    def __init__(self, prompt_ids: Sequence[int], images: Sequence[Image] = ()) -> None:
        self.prompt_ids = list(prompt_ids)
        self.images = list(images)
        """Pictures of prompt and completion, by the order of their tokens."""
        self.completion_ids: list[int] = []
        self.turns: list[Turn] = []
        self.kept = Rows.nothing(0)
        """Sampling masks: a row for each completion token, empty for one without a mask."""
        self.routes: list[Rows] = []
        """Experts of all tokens but the last, turn by turn; fewer if the engine gave none."""
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._spans: list[VersionSpan] = []

    @property
    def ids(self) -> list[int]:
        """All tokens so far: what the engine continues."""
        return self.prompt_ids + self.completion_ids

    @property
    def mask(self) -> list[bool]:
        """Which completion tokens the model wrote."""
        return list(self._mask)

    def asking(self, sampling: SamplingParams, num_kept: int) -> SamplingParams:
        """Sampling parameters of the turn after `num_kept` tokens of the completion: known routes are not
        asked for again, and stay those of the weights that computed them."""
        num_routed = min(sum(map(len, self.routes)), len(self.prompt_ids) + num_kept)
        return sampling.model_copy(update={"num_routed": num_routed}) if num_routed else sampling

    def add_turn(self, generation: Generation, engine_s: float = 0.0) -> None:
        first = len(self.completion_ids)
        self.turns.append(
            Turn(
                first=first,
                num_tokens=len(generation.token_ids),
                finish=generation.finish,
                num_prompt_tokens=len(self.prompt_ids) + first,
                num_cached_tokens=generation.num_cached_tokens,
                engine_s=engine_s,
            )
        )
        for version, start in generation.spans:
            self._begin_span(version, first + start)
        self._append(generation.token_ids, generation.logprobs, True, generation.choices.get(KEPT))
        routes = generation.choices.get(ROUTES)
        if routes is not None:
            self.routes.append(routes)

    def add_context(self, ids: Sequence[int], images: Sequence[Image] = ()) -> None:
        """Add tokens of the environment, or of the chat format between two turns, with pictures whose places
        count from the prompt's first token on."""
        self.images += images
        self._append(ids, [0.0] * len(ids), is_trained=False)

    def describe_last_turn(self, **fields: object) -> None:
        """Fill in fields of the last turn that are known only after it: calls, reward, environment's time."""
        self.turns[-1] = self.turns[-1].model_copy(update=fields)

    def rewind(self, num_tokens: int) -> None:
        """Forget the completion from token `num_tokens` on, which a client has rewritten; those tokens are
        not trained.

        Raises:
            ValueError: it would cut more than the last turn.
        """
        if not self.turns or num_tokens < self.turns[-1].first:
            raise ValueError(f"token {num_tokens} is before the last turn; begin a segment of its own")
        self._cut(num_tokens)
        last = self.turns[-1]
        self.turns[-1] = last.model_copy(update={"num_tokens": min(last.num_tokens, num_tokens - last.first)})

    def without_last_turn(self) -> "SegmentRecorder | None":
        """A copy that ends with the turn before the last one; None where there is none before it."""
        if len(self.turns) < 2:
            return None
        before = copy.copy(self)
        before.completion_ids = list(self.completion_ids)
        before._logprobs = list(self._logprobs)
        before._mask = list(self._mask)
        before.images = list(self.images)
        before.turns = self.turns[:-1]
        before._cut(before.turns[-1].end)
        return before

    def _cut(self, num_tokens: int) -> None:
        """Forget the tokens of the completion from `num_tokens` on; its turns stay."""
        del self.completion_ids[num_tokens:], self._logprobs[num_tokens:], self._mask[num_tokens:]
        self.kept = self.kept[:num_tokens]
        self.images = self.images_within(num_tokens)
        if self.routes:
            self.routes = [Rows.joined(self.routes)[: len(self.prompt_ids) + num_tokens]]
        # A completion begins with a span, also if all of its tokens are removed.
        self._spans = [span for span in self._spans if span[1] < num_tokens] or self._spans[:1]

    def images_within(self, num_tokens: int) -> list[Image]:
        """Pictures of the prompt and of the first `num_tokens` of the completion. None is cut: what a client
        may rewrite begins behind the last one."""
        end = len(self.prompt_ids) + num_tokens
        return [image for image in self.images if image.first < end]

    def segment(self) -> Segment:
        """The segment as it goes onto the wire. Raises ValueError: nothing was generated in it."""
        if not self.turns:
            raise ValueError("a segment without a turn of the model has nothing to train on")
        return Segment(
            prompt_ids=np.asarray(self.prompt_ids, dtype=np.int32),
            completion_ids=np.asarray(self.completion_ids, dtype=np.int32),
            logprobs=np.asarray(self._logprobs, dtype=np.float32),
            loss_mask=None if all(self._mask) else np.asarray(self._mask, dtype=np.bool_),
            spans=tuple(self._spans),
            turns=tuple(self.turns),
        )

    def _append(
        self, ids: Sequence[int], logprobs: Sequence[float], is_trained: bool, kept: Rows | None = None
    ) -> None:
        self.completion_ids += ids
        self.kept = Rows.joined([self.kept, kept or Rows.nothing(len(ids))])
        self._logprobs += logprobs
        self._mask += [is_trained] * len(ids)

    def _begin_span(self, version: int, first: int) -> None:
        """One span for each change of the version; of two that begin at one token, the later one counts."""
        if self._spans and self._spans[-1][1] == first:
            self._spans.pop()
        if not self._spans:
            # Tokens before the first turn count to its version: the spans have to cover every token.
            first = 0
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, first))


def images_in(recorders: Sequence[SegmentRecorder]) -> tuple[Image, ...]:
    """The pictures of a sample, from the recorders of its segments."""
    images: list[Image] = []
    for number, recorder in enumerate(recorders):
        images += (image.model_copy(update={"segment": number}) for image in recorder.images)
    return tuple(images)


def choices_of(recorders: Sequence[SegmentRecorder]) -> dict[str, Rows]:
    """The choices of a sample, from the recorders of its segments."""
    kept = Rows.joined([recorder.kept for recorder in recorders])
    choices = {KEPT: kept} if len(kept.values) else {}
    # All or none: incomplete routes are left out.
    routes = [
        Rows.joined(recorder.routes)[: len(recorder.ids) - 1] for recorder in recorders if recorder.routes
    ]
    if sum(map(len, routes)) == sum(len(recorder.ids) - 1 for recorder in recorders):
        choices[ROUTES] = Rows.joined(routes)
    return choices
