"""Which samples of another trainer share a request to `tidemill serve-rewards`."""

import asyncio
import contextlib
import inspect
import io
import json
import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PilImage

from tidemill.common.images.pictures import make_picture
from tidemill.common.images.sources import parse_source
from tidemill.services.console.serve.samples import ScoringRequest
from tidemill.services.reward import adapters


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each request had; the score of a sample is its truth."""
    sizes: list[int] = []

    async def scores_of(samples: list[dict[str, Any]], images: Sequence[str] = ()) -> list[dict[str, Any]]:
        assert not images
        sizes.append(len(samples))
        await asyncio.sleep(0)
        if any(sample["ground_truth"] == "refused" for sample in samples):
            raise RuntimeError("refused")
        return [{"value": sample["ground_truth"], "status": "failed", "error": "none"} for sample in samples]

    monkeypatch.setattr(adapters, "scores_of", scores_of)
    return sizes


def call(truth: Any) -> Any:
    return adapters.compute_score("", "answer", truth)


async def test_calls_of_one_moment_share_a_request_and_later_ones_do_not(requests: list[int]) -> None:
    assert await asyncio.gather(*map(call, range(600))) == [float(n) for n in range(600)]
    assert await call(7) == 7.0
    assert requests == [adapters.AT_ONCE, 600 - adapters.AT_ONCE, 1]


async def test_a_failure_is_of_its_own_sample_alone(requests: list[int]) -> None:
    first, second = await asyncio.gather(call(None), call(1), return_exceptions=True)
    assert isinstance(first, RuntimeError) and second == 1.0 and requests == [2]


async def test_who_is_cancelled_takes_no_other_call_along(requests: list[int]) -> None:
    tasks = [asyncio.create_task(call(n)) for n in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [1.0, 2.0] and requests == [3]


async def test_a_request_that_is_refused_is_so_for_all_of_it(requests: list[int]) -> None:
    errors = await asyncio.gather(call("refused"), call(1), return_exceptions=True)
    assert [str(error) for error in errors] == ["refused", "refused"]


def test_loops_of_several_threads_share_nothing(requests: list[int]) -> None:
    assert [adapters.compute_score_plain("", "answer", n) for n in (1, 2)] == [1.0, 2.0]
    assert requests == [1, 1]


async def test_neighbours_with_the_same_row_are_a_group_also_where_a_column_has_no_number(monkeypatch):
    groups: list[int] = []

    async def scores_of(samples: list[dict[str, Any]], images: Sequence[str]) -> list[dict[str, Any]]:
        groups.extend(sample["group"] for sample in samples)
        return [{"value": 1.0} for _ in samples]

    monkeypatch.setattr(adapters, "scores_of", scores_of)
    level = [float("nan") for _ in range(4)]
    await adapters.reward_async(["a", "a", "b", "b"], ["x"] * 4, level=level)
    assert groups == [0, 0, 1, 1]


async def test_half_a_character_can_be_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(body: bytes) -> tuple[int, bytes]:
        (sample,) = ScoringRequest.model_validate_json(body).samples
        return 200, json.dumps({"scores": [{"value": float(len(str(sample.completion)))}]}).encode()

    monkeypatch.setattr(adapters, "_post", post)
    monkeypatch.setattr(adapters, "PATIENCE_S", 0.0)
    assert await adapters.compute_score("", "ab\ud83d", "") == 3.0


async def test_a_machine_that_takes_no_connection_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "CONNECT_S", 0.1)
    monkeypatch.setattr(adapters, "PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as clients:
        address = server.getsockname()
        monkeypatch.setenv("TIDEMILL_REWARDS_URL", f"http://127.0.0.1:{address[1]}")
        # It accepts none, and Linux drops what does not fit into its queue, as if the machine was gone.
        clients.enter_context(socket.create_connection(address))
        with pytest.raises(RuntimeError, match="no scores"):
            await adapters.compute_score("", "answer", "")


ESTABLISHED = "01"
"""State of a connection in /proc/net/tcp. Others are of ended ones, whose port is in use again."""


def timers_of(port: int) -> list[str]:
    """The kernel's timers of the open connections from a port."""
    timers = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, _, timer, *_ = line.split()
        if local.endswith(f":{port:04X}") and state == ESTABLISHED:
            timers.append(timer.partition(":")[0])
    return timers


async def test_the_kernel_watches_a_connection_that_waits_for_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]}")
        timers.extend(timers_of(writer.get_extra_info("peername")[1]))
        body = b'{"scores": [{"value": 1.0}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("TIDEMILL_REWARDS_URL", f"http://127.0.0.1:{port}")
        assert await adapters.compute_score("", "answer", "") == 1.0
    assert timers == ["02"], "the one of keepalive"


def plain(completions: list[str], **_: Any) -> list[float | None]:
    return [None if text == "fails" else float(len(text)) for text in completions]


async def slow(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [math.nan if text == "nan" else 1.0 for text in completions]


async def test_rewards_are_combined_and_a_failure_of_one_is_a_failure() -> None:
    combined = adapters.combine_rewards(plain, slow, weights=[2.0, 0.5])
    rewards = await combined(completions=["a", "fails", "nan", "abc"], prompts=[""] * 4)
    assert rewards == [2.5, None, None, 6.5]
    assert inspect.iscoroutinefunction(combined), "TRL awaits no other"


async def test_combined_rewards_of_a_wrong_number_are_an_error() -> None:
    combined = adapters.combine_rewards(lambda completions, **_: [1.0])
    with pytest.raises(ValueError, match="gave 1 rewards for 2 samples"):
        await combined(completions=["a", "b"])
    for functions, weights in (((), ()), ((plain,), (1.0, 2.0))):
        with pytest.raises(ValueError, match="functions and"):
            adapters.combine_rewards(*functions, weights=weights)


@pytest.mark.parametrize(
    ("mode", "index", "palette_mode", "alpha"),
    [("P", 0, "RGB", ()), ("PA", (0, 255), "RGB", ()), ("P", 0, "RGBA", (255, 0))],
)
def test_pictures_that_only_their_palette_tells_apart_are_both_sent(
    mode: str, index: Any, palette_mode: str, alpha: tuple[int, ...]
) -> None:
    red = (255, 0, 0)
    blue = (0, 0, 255)
    colours = [(*red, each) for each in alpha] if alpha else [red, blue]
    pictures = []
    for colour in colours:
        picture = PilImage.new(mode, (4, 3), index)
        picture.putpalette(colour, palette_mode)
        pictures.append(picture)
    images = adapters._Images()
    assert images.take("Which?", {"images": [*pictures, pictures[0].copy()]}) == ("Which?", [0, 1, 0])
    pixels = [_pixel_of(url) for url in images.urls]
    assert pixels == [red, (255, 255, 255) if alpha else blue]


def _pixel_of(url: str) -> Any:
    source = parse_source(url, Path())
    assert source.content is not None and not source.fault
    return PilImage.open(io.BytesIO(make_picture(source.content, 1000).png)).getpixel((0, 0))


def test_equal_pictures_are_sent_once_and_other_columns_stay_as_they_are() -> None:
    red = PilImage.new("RGB", (4, 3), (255, 0, 0))
    blue = PilImage.new("CMYK", (4, 3), (255, 255, 0, 0))  # a mode that PNG does not have
    images = adapters._Images()
    row: dict[str, Any] = {"images": [red, blue], "image": "docker.io/python:3", "level": 1}
    assert images.take("Which?", row) == ("Which?", [0, 1])
    assert row == {"image": "docker.io/python:3", "level": 1}
    parts = [{"type": "image", "image": red.copy()}, {"type": "text", "text": "Which?"}]
    again: dict[str, Any] = {"image": red.copy()}
    prompt, numbers = images.take([{"role": "user", "content": parts}], again)
    assert (numbers, again) == ([0], {})
    assert prompt == [{"role": "user", "content": [{"type": "image"}, parts[1]]}]
    assert parts[0]["image"] == red, "the trainer's own messages stay as they are"
    assert len(images.urls) == 2
    for url, colour in zip(images.urls, ("red", "blue"), strict=True):
        assert _pixel_of(url) == {"red": (255, 0, 0), "blue": (0, 0, 255)}[colour]
