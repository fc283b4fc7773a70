"""A run with pictures: trained from the run's store, broken ones fail alone, and steps replay bit by bit."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.small_vision_models import SMALL_FAMILIES, make_vision_model
from tests.support.sessions import make_segment, make_session
from tests.support.training import answering_with, commits_of, messages
from tests.support.trajectories import make_trajectory
from tests.support.vision import image_of, png_of
from tests.support.whole_trainer import run, trainer_context
from tidemill.common.archive.archiver import archive_run
from tidemill.common.config import RunConfig
from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.history import History
from tidemill.common.images.processor import load_processor
from tidemill.common.images.store import ImageStore
from tidemill.common.process.service import ServiceContext
from tidemill.common.store import ClaimStore
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Ticket, Trajectory
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.policy import PolicyThread
from tidemill.services.trainer.replay.steps import StepReplay
from tidemill.services.trainer.service import serve

STEPS = 3


@pytest.fixture
def make_pictures_run(broker, keys, tmp_path):
    """Makes the context of a run whose rows have one picture or two, and one of text."""

    def make(family: str = "qwen2_5_vl", streams: dict[str, Any] | None = None, **trainer: Any):
        folder = tmp_path / family
        if not folder.exists():
            make_vision_model(folder, family)
            rows = []
            for number in range(6):
                pictures = [f"{number}-{i}.png" for i in range((1, 2, 0)[number % 3])]
                for i, name in enumerate(pictures):
                    (tmp_path / name).write_bytes(png_of(10 * number + i))
                parts = [{"type": "image"}, {"type": "text", "text": "?"}] * len(pictures)
                content = [*parts, {"type": "text", "text": f"how many {number}"}]
                prompt = [{"role": "user", "content": content}]
                rows.append({"prompt": prompt, "images": pictures, "ground_truth": str(number)})
            (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "run").mkdir(exist_ok=True)
        broker.claims = ClaimStore(tmp_path / "run")
        context = trainer_context(
            broker,
            keys,
            tmp_path / "run",
            folder,
            data={"train": str(tmp_path / "train.jsonl")},
            images={"max_pixels": 28 * 28 * 16},
            trainer={"policy": "transformers", "steps": STEPS, "checkpoint_every": 2, **trainer},
            streams={"trim": False, "archive": {"enabled": False}, **(streams or {})},
        )
        tree = context.config.model_dump(mode="json")
        tree["model"]["max_model_len"] = 256
        tree["data"]["max_prompt_tokens"] = 128
        context.config = RunConfig.model_validate(tree)
        return context

    return make


def remove_pictures(run_dir: Path) -> None:
    for path in sorted((run_dir / "images").iterdir()):
        path.unlink()


def answer(ticket: Ticket, index: int, **fields: Any) -> Trajectory:
    ids = np.array([3 + ticket.ticket % 20, 4 + index, 7], np.int32)
    return make_trajectory(
        ticket.ticket,
        index,
        step=ticket.step,
        group_size=ticket.group_size,
        prompt_ids=ticket.prompt_ids,
        images=ticket.images,
        spans=((ticket.min_version, 0),),
        completion_ids=fields.pop("completion_ids", ids),
        logprobs=np.full(3, -1.0, np.float32),
        ground_truth=ticket.ground_truth,
        source=ticket.source,
        **fields,
    )


def replay_of(context: ServiceContext, broker: Any) -> StepReplay:
    history = History(context.keys.run_id, context.run_dir, broker)
    policy = open_policy(context.config, run_dir=context.run_dir)
    return StepReplay(history, context.config, context.run_dir, policy, PolicyThread(), lambda _: None)


async def replayed(context: ServiceContext, *steps: int, broker: Any = None) -> list[dict[str, Any]]:
    return [result async for result in replay_of(context, broker).results(steps)]


@pytest.mark.parametrize("family", SMALL_FAMILIES)
async def test_steps_with_pictures_replay_bit_by_bit(make_pictures_run, broker, keys, family):
    context = make_pictures_run(family, train_tower=family == "qwen3_vl")
    async with answering_with(broker, keys, answer):
        await run(context)
    tickets = await messages(broker, keys.prompts(), Ticket)
    assert {len(ticket.images) for ticket in tickets} == {0, 1, 2}
    commits = await commits_of(broker, keys)
    assert all(commit.processor.endswith("Pil " + commit.processor[-32:]) for commit in commits)
    results = await replayed(context, 0, STEPS - 1, broker=broker)
    assert [result["equal"] for result in results] == [True, True]


async def test_steps_with_pictures_replay_from_the_archive_alone(make_pictures_run, broker, keys):
    context = make_pictures_run(streams={"archive": {"enabled": True, "segment_mb": 0.004}})
    async with answering_with(broker, keys, answer):
        await run(context)
    await archive_run(broker, keys, context.run_dir, context.config.streams.archive, is_last=True)
    results = await replayed(context, 0, STEPS - 1)
    assert [result["equal"] for result in results] == [True, True]


class Sessions:
    """Answers tickets with sessions: the environment shows a picture after the first turn, and a second
    segment has another one."""

    def __init__(self, context: ServiceContext) -> None:
        self.store = ImageStore(context.run_dir)
        self.processor = load_processor(context.config.model.path, context.config.images)

    def context_of(self, seed: int, first: int, segment: int) -> tuple[tuple[int, ...], Image]:
        """Tokens of an answer that begins at token `first`, and the picture in it."""
        png = png_of(seed, 84, 56)
        ids, ((start, count),) = self.processor.expand([5, self.processor.placeholder_id, 6], [png])
        self.store.put(png)
        image = image_of(png, first + start, count)
        return tuple(ids.tolist()), image.model_copy(update={"segment": segment})

    def answer(self, ticket: Ticket, index: int, is_wrong: bool = False) -> Trajectory:
        prompt = tuple(ticket.prompt_ids.tolist())
        turn = (3 + ticket.ticket % 20, 4 + index)
        seed = 1000 + ticket.ticket
        ids, image = self.context_of(seed, len(prompt) + len(turn), 0)
        # A history of its own, without the pictures of the prompt.
        other_prompt = (*turn, 8, 9)
        other_ids, other_image = self.context_of(seed + index, len(other_prompt) + len(turn), 1)
        segments = [
            make_segment(prompt, turn, ids, (7, *turn), logprob=-1.0),
            make_segment(other_prompt, turn, other_ids, (9,), logprob=-1.0),
        ]
        segments = [s.model_copy(update={"spans": ((ticket.min_version, 0),)}) for s in segments]
        if is_wrong:
            image = image.model_copy(update={"first": image.first - 1})
        return make_session(
            ticket.ticket,
            index,
            *segments,
            step=ticket.step,
            group_size=ticket.group_size,
            images=(*ticket.images, image, other_image),
            ground_truth=ticket.ground_truth,
            source=ticket.source,
        )


@pytest.mark.parametrize("family", SMALL_FAMILIES)
async def test_sessions_with_pictures_in_later_turns_and_forks_replay_from_streams_and_archive(
    make_pictures_run, broker, keys, family
):
    context = make_pictures_run(family, streams={"archive": {"enabled": True, "segment_mb": 0.004}})
    sessions = Sessions(context)
    async with answering_with(broker, keys, sessions.answer):
        await run(context)
    commits = await commits_of(broker, keys)
    assert not any(commit.dropped for commit in commits)
    results = await replayed(context, 0, STEPS - 1, broker=broker)
    assert [result["equal"] for result in results] == [True, True]
    await archive_run(broker, keys, context.run_dir, context.config.streams.archive, is_last=True)
    results = await replayed(context, 0, STEPS - 1)
    assert [result["equal"] for result in results] == [True, True]


@pytest.mark.timeout(900)  # ranks start twice, on a busy machine
async def test_two_ranks_replay_sessions_with_pictures_bit_by_bit(make_pictures_run, broker, keys):
    context = make_pictures_run("qwen3_vl", train_tower=True, num_ranks=2, device="cpu", deterministic=True)
    sessions = Sessions(context)
    async with answering_with(broker, keys, sessions.answer):
        await asyncio.wait_for(serve(context), 400)
    commits = await commits_of(broker, keys)
    assert len(commits) == STEPS and not any(commit.dropped for commit in commits)
    replay = replay_of(context, broker)
    policy: Any = replay.policy
    with closing(policy):
        results = [result async for result in replay.results((0, STEPS - 1))]
    assert [result["equal"] for result in results] == [True, True]


async def test_a_later_picture_at_other_tokens_than_its_own_fails_its_sample_alone(
    make_pictures_run, broker, keys
):
    context = make_pictures_run(group_size=4)
    sessions = Sessions(context)

    def spoiled(ticket: Ticket, index: int) -> Trajectory:
        return sessions.answer(ticket, index, is_wrong=index == 1)

    async with answering_with(broker, keys, spoiled):
        await run(context)
    commits = await commits_of(broker, keys)
    for commit in commits:
        dropped = {(ticket, index): reason for ticket, index, reason in commit.dropped}
        assert dropped == {(ticket, 1): "bad_numbers" for ticket in commit.groups}


async def test_a_sample_without_its_picture_or_with_a_placeholder_fails_alone(
    make_pictures_run, broker, keys
):
    context = make_pictures_run(group_size=4)
    banned: list[tuple[int, int]] = []
    lost: list[tuple[int, int]] = []

    def spoiled(ticket: Ticket, index: int) -> Trajectory:
        sample = answer(ticket, index)
        if not ticket.images or index > 1:
            return sample
        if index == 0:
            # An id that stands for pixels, as a faulty engine would sample it.
            banned.append(sample.key)
            placeholder = int(ticket.prompt_ids[ticket.images[0].first])
            return answer(ticket, index, completion_ids=np.array([5, placeholder, 6], np.int32))
        lost.append(sample.key)
        missing = ticket.images[0].model_copy(update={"digest": "0" * 32})
        return sample.model_copy(update={"images": (missing, *ticket.images[1:])})

    async with answering_with(broker, keys, spoiled):
        await run(context)
    commits = await commits_of(broker, keys)
    dropped = {(ticket, index): reason for commit in commits for ticket, index, reason in commit.dropped}
    trained = {key for commit in commits for key in commit.trained_keys}
    tickets = {ticket for commit in commits for ticket in commit.groups}
    assert banned and lost
    for key in [key for key in banned if key[0] in tickets]:
        assert dropped[key] == "bad_numbers"
    for key in [key for key in lost if key[0] in tickets]:
        assert dropped[key] == "no_payload"
    assert trained.isdisjoint([*banned, *lost])
    results = await replayed(context, STEPS - 1, broker=broker)
    assert [result["equal"] for result in results] == [True]


async def test_another_processor_is_refused_on_resume_and_replay(make_pictures_run, broker, keys):
    context = make_pictures_run()
    async with answering_with(broker, keys, answer):
        await run(context)
    changed_images = ImagesConfig(max_pixels=28 * 28 * 9)
    trainer = context.config.trainer.model_copy(update={"steps": STEPS + 1})
    context.config = context.config.model_copy(update={"images": changed_images, "trainer": trainer})
    broker.claims = ClaimStore(context.run_dir)  # as in a process of its own
    with pytest.raises(ConfigError, match="image processor"):
        await run(context)
    for step in (0, STEPS - 1):  # from the starting model, and from a checkpoint
        with pytest.raises(ConfigError, match="image processor"):
            await replayed(context, step, broker=broker)


async def test_a_replay_without_a_picture_of_the_step_says_so(make_pictures_run, broker, keys):
    context = make_pictures_run()
    async with answering_with(broker, keys, answer):
        await run(context)
    remove_pictures(context.run_dir)
    with pytest.raises(TidemillError, match="is missing"):
        await replayed(context, 0, broker=broker)
