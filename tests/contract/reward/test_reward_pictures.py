"""Rewards that see: functions get the pictures of a prompt from the run's store, against a real Redis."""

import asyncio
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.rewards import num_pending, scores, worker
from tests.support.seen_samples import BLUE, GREEN, RED, seen_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError, RefusedError
from tidemill.common.images.store import IMAGES_FOLDER, ImageStore
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import PICTURES_OF, update_state
from tidemill.common.streams import append
from tidemill.common.wire.images import PICTURES_FAULT
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import ScoreStatus
from tidemill.services.reward.functions.reward_function import load_function

SOURCE = """
    import numpy as np

    def colour(image):
        assert image.mode == "RGB" and image.size == (8, 6)
        red, green, blue = image.getpixel((0, 0))
        image.putpixel((0, 0), (1, 2, 3))  # each call has pictures of its own
        return red * 1e6 + green * 1e3 + blue

    def verl(data_source, solution_str, ground_truth, images):
        return sum(colour(image) for image in images)

    async def waits(data_source, solution_str, ground_truth, images=None):
        return sum(colour(image) for image in images)

    def trl(completions, images, **columns):
        assert len(completions) == len(images)
        return [sum(map(colour, each)) for each in images]

    def trl_column(completions, image, **columns):
        return [-1.0 if each is None else colour(each) for each in image]

    def batch(data_sources, solution_strs, ground_truths, extra_infos, images):
        return [sum(map(colour, each)) for each in images]

    def ordered(solution_str, ground_truth, images):
        return sum(colour(image) * (1 + number) for number, image in enumerate(images))

    def rubric(completion, answer, images, **kwargs):
        return sum(map(colour, images))

    class Scorer:
        def compute_score(self, solution_str, ground_truth, images):
            return sum(map(colour, images))

    def unasked(data_source, solution_str, ground_truth, **kwargs):
        assert "images" not in kwargs and "image" not in kwargs
        return 5.0

    def text(prompts, completions, **columns):
        return [float(prompt[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Which colours?"}])
                for prompt in prompts]

    def group(scores, samples, images):
        assert [sample["score"] for sample in samples] == scores
        return [score + sum(map(colour, each)) for score, each in zip(scores, images)]
"""
RED_VALUE = 255e6
GREEN_VALUE = 255e3
BLUE_VALUE = 255.0


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "seeing.py").write_text(dedent(SOURCE))
    return f"{tmp_path / 'seeing.py'}:"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("verl", "auto"),
        ("waits", "auto"),
        ("trl", "auto"),
        ("trl_column", "auto"),
        ("batch", "auto"),
        ("rubric", "verifiers"),
        ("Scorer", "class"),
    ],
)
async def test_a_function_gets_the_pictures_of_its_sample_if_it_names_them(
    broker: Broker, keys: Keys, tmp_path: Path, store: ImageStore, reward: str, name: str, style: str
) -> None:
    await append(
        broker,
        keys.trajectories(),
        seen_trajectory(store, [RED], ticket=0),
        seen_trajectory(store, [GREEN], ticket=1),
        seen_trajectory(store, [GREEN], ticket=1, index=1),
    )
    async with worker(broker, keys, run_dir=tmp_path, images={}, function=reward + name, style=style):
        published = await scores(broker, keys, 3)
    assert [score.error for score in published] == [""] * 3
    assert [score.value for score in published] == [RED_VALUE, GREEN_VALUE, GREEN_VALUE]


@pytest.fixture
async def two_and_none(broker: Broker, keys: Keys, store: ImageStore) -> None:
    """A trajectory whose prompt has two pictures, and one whose prompt has none."""
    of_two = seen_trajectory(store, [RED, BLUE], ticket=0)
    await append(broker, keys.trajectories(), of_two, seen_trajectory(store, [], ticket=1))


@pytest.mark.usefixtures("two_and_none")
async def test_several_pictures_come_in_their_order_and_none_where_a_prompt_has_none(
    broker: Broker, keys: Keys, tmp_path: Path, reward: str
) -> None:
    async with worker(broker, keys, run_dir=tmp_path, images={}, function=reward + "verl"):
        published = await scores(broker, keys, 2)
    assert [score.value for score in published] == [RED_VALUE + BLUE_VALUE, 0.0]


@pytest.mark.usefixtures("two_and_none")
async def test_a_function_that_takes_one_picture_gets_none_of_several(
    broker: Broker, keys: Keys, tmp_path: Path, reward: str
) -> None:
    async with worker(broker, keys, run_dir=tmp_path, images={}, function=reward + "trl_column"):
        of_two, of_none = await scores(broker, keys, 2)
    assert of_two.status is ScoreStatus.FAILED
    assert "has 2 pictures" in of_two.error and of_two.attempts == 1
    assert of_none.value == -1.0


@pytest.mark.parametrize(("name", "value"), [("unasked", 5.0), ("text", 1.0)])
async def test_a_function_that_does_not_name_them_gets_none_and_waits_for_none(
    broker: Broker, keys: Keys, tmp_path: Path, store: ImageStore, reward: str, name: str, value: float
) -> None:
    await append(broker, keys.trajectories(), seen_trajectory(store, [RED]))
    (tmp_path / IMAGES_FOLDER).rename(tmp_path / "away")
    async with worker(broker, keys, run_dir=tmp_path, images={}, function=reward + name):
        (score,) = await scores(broker, keys, 1)
    assert (score.value, score.error) == (value, "")


@pytest.mark.parametrize("name", ["trl", "batch"])
async def test_functions_of_whole_groups_get_the_pictures_of_each_sample(
    broker: Broker, keys: Keys, tmp_path: Path, store: ImageStore, reward: str, name: str
) -> None:
    samples = [seen_trajectory(store, [RED], 0, index, group_size=2) for index in range(2)]
    await append(broker, keys.trajectories(), *samples)
    rewards = {"all": {"function": reward + name, "per": "group"}}
    started = worker(
        broker, keys, run_dir=tmp_path, images={}, rewards=rewards, group=reward + "group", max_attempts=1
    )
    async with started:
        published = await scores(broker, keys, 2)
    assert [score.error for score in published] == ["", ""]
    assert [score.value for score in published] == [2 * RED_VALUE] * 2


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")]
)
async def test_a_missing_or_damaged_picture_fails_its_sample_with_a_reason_and_no_other(
    broker: Broker, keys: Keys, tmp_path: Path, store: ImageStore, reward: str, damage: Any
) -> None:
    broken = seen_trajectory(store, [RED], ticket=0)
    damage(tmp_path / IMAGES_FOLDER / f"{broken.images[0].digest}.png")
    await append(broker, keys.trajectories(), broken, seen_trajectory(store, [GREEN], ticket=1))
    async with worker(broker, keys, run_dir=tmp_path, images={}, function=reward + "verl"):
        failed, scored = await scores(broker, keys, 2)
    assert failed.status is ScoreStatus.FAILED and failed.value is None and failed.attempts == 1
    assert failed.error.startswith(PICTURES_FAULT) and broken.images[0].digest in failed.error
    assert not failed.is_code_error
    assert scored.value == GREEN_VALUE


async def test_a_store_that_is_away_is_waited_for_and_fails_nothing(
    broker: Broker, keys: Keys, tmp_path: Path, store: ImageStore, reward: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tidemill.common.images.store.FIRST_PAUSE_S", 0.01)
    num_reads = 0
    read = ImageStore.read

    def count(self: ImageStore, image: Any) -> bytes:
        nonlocal num_reads
        num_reads += 1
        return read(self, image)

    monkeypatch.setattr(ImageStore, "read", count)
    samples = [seen_trajectory(store, [RED], 0, index) for index in range(3)]
    await append(broker, keys.trajectories(), *samples)
    (tmp_path / IMAGES_FOLDER).rename(tmp_path / "away")
    started = worker(broker, keys, run_dir=tmp_path, images={}, function=reward + "verl", timeout_s=0.5)
    async with started:
        await wait_until(lambda: num_reads > 3)
        assert await num_pending(broker, keys) == 3
        (tmp_path / "away").rename(tmp_path / IMAGES_FOLDER)
        published = await scores(broker, keys, 3)
    assert [score.value for score in published] == [RED_VALUE] * 3
    assert [score.attempts for score in published] == [1] * 3


async def test_a_store_that_refuses_the_keys_of_a_worker_ends_it_and_fails_no_sample(
    broker: Broker, keys: Keys, tmp_path: Path, store: ImageStore, reward: str, monkeypatch: Any
) -> None:
    def refuse(self: ImageStore, image: Any) -> bytes:
        raise RefusedError("the store answers 403")

    monkeypatch.setattr(ImageStore, "read", refuse)
    monkeypatch.setattr("tidemill.common.images.store.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("tidemill.common.store.claims.REFUSED_S", 0.05)
    await append(broker, keys.trajectories(), seen_trajectory(store, [RED]))
    started = worker(broker, keys, run_dir=tmp_path, images={}, function=reward + "verl", drain_s=0.1)
    async with started as context:
        await asyncio.wait_for(context.stopping.wait(), 60)
    assert isinstance(context.failure, ConfigError)
    # Handed back: whoever comes next takes it.
    monkeypatch.undo()
    async with worker(broker, keys, "w2", run_dir=tmp_path, images={}, function=reward + "verl"):
        (score,) = await scores(broker, keys, 1)
    assert score.value == RED_VALUE


async def test_a_cached_score_is_not_that_of_another_picture(
    broker: Broker, keys: Keys, tmp_path: Path, store: ImageStore, reward: str
) -> None:
    """All else is equal: prompt, ids, completion and truth."""
    for ticket, colours in enumerate(([RED], [GREEN], [RED], [RED, GREEN], [GREEN, RED])):
        ids = seen_trajectory(store, [RED, GREEN]).prompt_ids
        seen = seen_trajectory(store, colours, ticket, prompt_ids=ids, extra={"prompt": "Which colours?"})
        await append(broker, keys.trajectories(), seen)
    rewards = {"seen": {"function": reward + "ordered", "cache": True}}
    async with worker(broker, keys, run_dir=tmp_path, images={}, rewards=rewards):
        published = await scores(broker, keys, 5)
    red_first = RED_VALUE + 2 * GREEN_VALUE
    green_first = GREEN_VALUE + 2 * RED_VALUE
    assert [score.value for score in published] == [RED_VALUE, GREEN_VALUE, RED_VALUE, red_first, green_first]


async def test_a_run_that_scores_another_ones_history_reads_the_pictures_of_that_run(
    broker: Broker, keys: Keys, tmp_path: Path, reward: str
) -> None:
    (tmp_path / "first").mkdir()
    store = ImageStore(tmp_path / "first")
    await append(broker, keys.trajectories(), seen_trajectory(store, [BLUE]))
    await update_state(broker, keys, **{PICTURES_OF: "first"})
    started = worker(broker, keys, run_dir=tmp_path / "first.rescore-1", images={}, function=reward + "verl")
    async with started:
        (score,) = await scores(broker, keys, 1)
    assert score.value == BLUE_VALUE


def test_a_function_may_require_pictures_where_a_run_has_some_and_nowhere_else(reward: str) -> None:
    assert load_function(reward + "verl", {}, has_pictures=True).takes_pictures
    assert not load_function(reward + "unasked", {}, has_pictures=True).takes_pictures
    with pytest.raises(ConfigError, match="nothing gives images"):
        load_function(reward + "verl", {})
    assert not load_function(reward + "waits", {}).takes_pictures
    with pytest.raises(ConfigError, match="must not set images"):
        load_function(reward + "waits", {"images": []}, has_pictures=True)
