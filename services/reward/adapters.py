"""Rewards of `tidemill serve-rewards` for the trainers verl and TRL. Import this file, or copy it: it needs
Python's standard library alone.

    TIDEMILL_REWARDS_URL     where the rewards are served (default: http://127.0.0.1:8440)
    TIDEMILL_REWARDS_TOKEN   the token, where one is asked for

Guarantee: a reward that failed for good is never a 0. TRL gets None for it, and leaves the sample out if this
is its only reward function: beside others it counts None as 0, unless `combine_rewards` makes one function of
all. verl has no place for a missing reward, so the call raises, unless `reward.on_failure` of the service
gives a number. A request that was not answered, because the service was busy or restarted, is sent again for
up to `PATIENCE_S`. Pictures of TRL's columns and messages are sent along; verl gives reward functions none.
"""

import asyncio
import base64
import hashlib
import inspect
import io
import json
import math
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 600.0
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
CONNECT_S = 10.0
ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
"""The kernel asks whether the server's machine is there, and ends the connection after a minute without an
answer. Scores themselves may take as long as they need."""
TRUTHS = ("ground_truth", "solution", "answer")
"""Columns of TRL's datasets that hold the truth; the first one that is there."""
AT_ONCE = 512
"""Most samples in a request that combines calls of `score_of`."""
_calls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Any]] = weakref.WeakKeyDictionary()
"""Event loop -> samples of the next requests, each with the future of its score."""
PICTURE_COLUMNS = ("images", "image")
"""TRL's columns of pictures."""
NOT_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL passes besides the columns of its dataset."""


async def scores_of(samples: list[dict[str, Any]], images: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The scores of samples, as POST /v1/scores takes and gives them. `images` are data URLs of pictures that
    samples refer to by index.

    Raises:
        RuntimeError: the service refused the request, or was away for too long.
    """
    # Lone surrogates are no JSON to the service.
    tree = {"samples": samples, "images": list(images)} if images else {"samples": samples}
    body = json.dumps(tree, default=_plain, ensure_ascii=False).encode(errors="replace")
    deadline = time.monotonic() + PATIENCE_S
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            status, answer = await _post(body)
        except (OSError, ValueError) as error:
            status = 503
            answer = str(error).encode()
        if status == 200:
            scores: list[dict[str, Any]] = json.loads(answer)["scores"]
            return scores
        if status not in (429, 503) or time.monotonic() > deadline:
            said = answer.decode(errors="replace")[:500]
            raise RuntimeError(f"no scores from {_url()}: {status}: {said}")
        # Random: all calls that a busy or dead service refused at once must not come back at once.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def score_of(sample: dict[str, Any]) -> dict[str, Any]:
    """The score of one sample. Calls in one iteration of the event loop share a request, which is answered
    when all of its samples are scored: a request for each would cost more than most rewards."""
    loop = asyncio.get_running_loop()
    calls = _calls.setdefault(loop, [])
    score: asyncio.Future[dict[str, Any]] = loop.create_future()
    calls.append((sample, score))
    # Not awaited: a caller that is cancelled must not cancel the others' request.
    sending = loop.create_task(_send_calls(loop)) if len(calls) == 1 else None
    scored = await score
    del sending
    return scored


async def _send_calls(loop: asyncio.AbstractEventLoop) -> None:
    calls = _calls.pop(loop)  # a task begins after those that were ready before it
    await asyncio.gather(*(_send(calls[at : at + AT_ONCE]) for at in range(0, len(calls), AT_ONCE)))


async def _send(calls: list[tuple[dict[str, Any], "asyncio.Future[dict[str, Any]]"]]) -> None:
    try:
        scores = await scores_of([sample for sample, _ in calls])
    except Exception as error:
        for _, waiting in calls:
            if not waiting.done():
                waiting.set_exception(error)
        return
    for (_, waiting), score in zip(calls, scores, strict=True):
        if not waiting.done():
            waiting.set_result(score)


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> float:
    """verl's reward function, for its reward loop.

    Raises:
        RuntimeError: the reward failed for good.
    """
    sample = {
        "completion": solution_str,
        "ground_truth": ground_truth,
        "data_source": str(data_source),
        "extra_info": dict(extra_info or {}),
    }
    score = await score_of(sample)
    if score["value"] is None:
        raise RuntimeError(f"the reward failed ({score['status']}): {score['error']}")
    return float(score["value"])


def compute_score_plain(*args: Any, **kwargs: Any) -> float:
    """`compute_score` as a plain function."""
    return float(_run(compute_score(*args, **kwargs)))


async def reward_async(
    prompts: list[Any], completions: list[Any], completion_ids: Any = None, **columns: Any
) -> list[float | None]:
    """TRL's reward function. Consecutive samples with the same prompt and row are a group."""
    step = getattr(columns.get("trainer_state"), "global_step", 0)
    columns = {name: column for name, column in columns.items() if name not in NOT_COLUMNS}
    truth = next((name for name in TRUTHS if name in columns), "")
    samples: list[dict[str, Any]] = []
    images = _Images()
    before = None
    group = -1
    for at, (asked, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: column[at] for name, column in columns.items()}
        prompt, numbers = images.take(asked, row)
        # Floats as text: a NaN equals no other one.
        columns_as_text = {
            name: repr(item) if isinstance(item, float) else item for name, item in row.items()
        }
        now = (prompt, numbers, columns_as_text)
        if now != before:
            before = now
            group += 1
        extra = {name: value for name, value in row.items() if name not in ("data_source", truth)}
        sample = {
            "prompt": prompt,
            "completion": completion,
            "ground_truth": row.get(truth),
            "data_source": str(row.get("data_source", "")),
            "extra_info": extra,
            "group": group,
            "step": step,
        }
        if completion_ids is not None:
            sample["completion_ids"] = list(completion_ids[at])
        if numbers:
            sample["images"] = numbers
        samples.append(sample)
    return [score["value"] for score in await scores_of(samples, images.urls)]


def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
    """`reward_async` as a plain function."""
    scores: list[float | None] = _run(reward_async(prompts, completions, **columns))
    return scores


def combine_rewards(
    *functions: Callable[..., Any], weights: Sequence[float] = ()
) -> Callable[..., Awaitable[list[float | None]]]:
    """One reward function for TRL in place of several: their weighted sum, None where one of them is None.

    TRL itself leaves None out of the sum, which is a 0 for that function, unless all functions gave None.

        GRPOTrainer(model, combine_rewards(reward_async, length_reward, weights=[1.0, 0.1]), ...)

    Args:
        functions: reward functions in TRL's style, plain or async.
        weights: of each function; 1 where there are none. They take the place of TRL's `reward_weights`.

    Raises:
        ValueError: there are no functions, or not as many weights.
    """
    factors = list(weights) or [1.0] * len(functions)
    if not functions or len(factors) != len(functions):
        raise ValueError(f"combine_rewards got {len(functions)} functions and {len(factors)} weights")

    async def combined_reward(*, completions: list[Any], **columns: Any) -> list[float | None]:
        calls = [_call_reward(function, completions=completions, **columns) for function in functions]
        answers = await asyncio.gather(*calls)
        for function, rewards in zip(functions, answers, strict=True):
            if len(rewards) != len(completions):
                raise ValueError(
                    f"{_name_of(function)} gave {len(rewards)} rewards for {len(completions)} samples"
                )
            log_metric = columns.get("log_metric")
            if log_metric:
                _log_mean(log_metric, _name_of(function), rewards)
        return [_weighted_sum(rewards, factors) for rewards in zip(*answers, strict=True)]

    return combined_reward


async def _call_reward(function: Callable[..., Any], **arguments: Any) -> list[Any]:
    # A plain function may wait for a server, and must not hold up the others.
    rewards = await asyncio.to_thread(function, **arguments)
    return list(await rewards if inspect.isawaitable(rewards) else rewards)


def _weighted_sum(rewards: Sequence[float | None], factors: Sequence[float]) -> float | None:
    """None where one of the rewards is None or NaN."""
    total = 0.0
    for reward, factor in zip(rewards, factors, strict=True):
        if reward is None or math.isnan(reward):
            return None
        total += factor * float(reward)
    return total


def _log_mean(log_metric: Callable[[str, float], Any], name: str, rewards: Sequence[float | None]) -> None:
    numbers = [float(reward) for reward in rewards if reward is not None and not math.isnan(reward)]
    if numbers:
        log_metric(f"combined/{name}", sum(numbers) / len(numbers))
    log_metric(f"combined/{name}/failed", 1.0 - len(numbers) / len(rewards))


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class _Images:
    """The pictures of a request, each once."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self._numbers: dict[Any, int] = {}
        """Index of each picture. TRL decodes that of a row anew for each completion; to compare pixels takes
        much less time than to write a PNG."""

    def take(self, prompt: Any, row: dict[str, Any]) -> tuple[Any, list[int]]:
        """The prompt without pixels, and the indices of its pictures, which are in its messages or in a
        column of the row. Such columns are removed from the row."""
        # Where messages have the pictures, TRL has put those of the column there.
        in_messages: list[Any] = []
        if isinstance(prompt, list):
            prompt = [_without_pixels(message, in_messages) for message in prompt]
        pictures = in_messages
        for name in PICTURE_COLUMNS:
            value = row.get(name)
            of_column = list(value) if isinstance(value, list | tuple) else [value]
            if of_column and all(_is_picture(item) for item in of_column):
                del row[name]
                pictures = pictures or of_column
        return prompt, [self._number_of(picture) for picture in pictures]

    def _number_of(self, picture: Any) -> int:
        identity = _identity_of(picture)
        if identity not in self._numbers:
            self._numbers[identity] = len(self.urls)
            self.urls.append(_data_url(picture))
        return self._numbers[identity]


def _without_pixels(message: dict[str, Any], pictures: list[Any]) -> dict[str, Any]:
    """The message with empty parts in place of its pictures, which are added to `pictures`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for item in content:
        picture = item.get("image") if isinstance(item, dict) and item.get("type") == "image" else None
        if _is_picture(picture):
            pictures.append(picture)
            item = {"type": "image"}
        parts.append(item)
    return {**message, "content": parts}


def _is_picture(value: Any) -> bool:
    """Whether it is a picture of PIL, or a file's bytes or path as `datasets` has them."""
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"}
    is_pils = hasattr(value, "save") and hasattr(value, "getpixel")
    return is_pils or (isinstance(value, str) and value.startswith("data:image/"))


def _identity_of(picture: Any) -> Any:
    """Equal for equal pictures."""
    if isinstance(picture, str):
        return picture
    if isinstance(picture, dict):
        return picture["bytes"], picture["path"]
    palette = picture.getpalette(rawmode=None)  # with its alpha, if it has any; None without a palette
    digest = hashlib.blake2b(picture.tobytes(), digest_size=16).digest()
    return picture.mode, picture.size, str(palette), str(picture.info.get("transparency")), digest


def _data_url(picture: Any) -> str:
    if isinstance(picture, str):
        return picture
    if isinstance(picture, dict):
        content = picture["bytes"]
        if content is None:
            with open(picture["path"], "rb") as file:
                content = file.read()
    else:
        buffer = io.BytesIO()
        try:
            picture.save(buffer, "PNG", compress_level=1)
        except OSError:  # a mode that PNG does not have, such as CMYK
            picture.save(buffer, "TIFF")
        content = buffer.getvalue()
    # Without the name of a format: the service looks at the bytes.
    return f"data:;base64,{base64.b64encode(content).decode()}"


def _url() -> str:
    return os.environ.get("TIDEMILL_REWARDS_URL", "http://127.0.0.1:8440")


async def _post(body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer. Raises OSError: there is none, or it is truncated."""
    url = urlsplit(_url())
    token = os.environ.get("TIDEMILL_REWARDS_TOKEN", "")
    port = url.port or (443 if url.scheme == "https" else 80)
    authorization = f"Authorization: Bearer {token}\r\n" if token else ""
    head = (
        f"POST {url.path.rstrip('/')}/v1/scores HTTP/1.1\r\nHost: {url.netloc}\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    opening = asyncio.open_connection(url.hostname, port, ssl=url.scheme == "https" or None)
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await opening
    try:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in ALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        writer.write(head.encode() + body)
        await writer.drain()
        answer, _, content = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *lines = answer.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        header, _, text = line.partition(":")
        headers[header.lower()] = text.strip()
    if len(content) != int(headers.get("content-length", -1)):
        raise OSError("the connection ended before the answer did")
    return int(first.split()[1]), content


def _run(work: Any) -> Any:
    """Run a coroutine to its end, in a thread of its own: the caller's may have a running loop."""
    done: list[Any] = []

    def target() -> None:
        try:
            done.append((asyncio.run(work), None))  # noqa: TID251 (the file stands alone)
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    result, error = done[0]
    if error is not None:
        raise error
    return result


def _plain(value: Any) -> Any:
    """JSON's form of other values: lists and numbers for NumPy's, text for all else."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
