"""`tidemill web`: what its pages say of a run in Redis and of one whose Redis is gone, and that no text of
others takes effect."""

import asyncio
import csv
import io
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import SERVERS
from tests.support.archives import archive
from tests.support.models import run_config
from tests.support.numbered import append_numbered
from tests.support.preloaded import REPO
from tests.support.recorded_sessions import as_session
from tests.support.servers import free_port
from tests.support.trajectories import make_config
from tests.support.vision import file_of, noise
from tests.support.waiting import wait_until
from tests.support.web_runs import (
    SCRIPT,
    commit_of,
    completion,
    make_ticket,
    seeing_question,
    session,
    write_folder,
    write_run,
)
from tidemill.common.history import StreamName
from tidemill.common.images.store import ImageStore
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import PICTURES_OF, publish_config, update_state
from tidemill.common.streams import append
from tidemill.common.wire.keys import RUNS, Keys
from tidemill.common.wire.messages import Ticket
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.web import runs
from tidemill.services.console.web.curves import MAX_POINTS
from tidemill.services.console.web.group_pages import MAX_PICTURE_BYTES
from tidemill.services.console.web.runs import Catalog
from tidemill.services.console.web.server import CONTENT_POLICY, Access, create_app
from tidemill.services.console.web.site import csv_file

TYPED = '"><script>window.hacked = 3</script>'
ENDED = Keys("ended")
MODEL = REPO / "examples" / "arith" / "model"

# What differs between servers is hidden by `History`, and tested there.
pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


@pytest.fixture
async def browse(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Any]:
    """Opens a browser's view of a run of the test's folder; addresses are below the run's."""
    catalog = Catalog(tmp_path)
    transport = httpx.ASGITransport(create_app(catalog, Access.of("127.0.0.1")), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=60, follow_redirects=True) as client:

        def browse(run_id: str) -> httpx.AsyncClient:
            client.base_url = httpx.URL(f"http://127.0.0.1/run/{run_id}")
            return client

        yield browse
    await catalog.close()


@pytest.fixture
async def site(
    browse: Any, redis_server: EmbeddedRedis, broker: Broker, keys: Keys, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> httpx.AsyncClient:  # fmt: skip
    """On a run in Redis that was read."""
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    await write_run(broker, keys, write_folder(tmp_path, keys))
    client: httpx.AsyncClient = browse(keys.run_id)

    async def is_read() -> bool:
        changes = (await client.get("/changes.json")).json()
        return bool((changes["groups"], changes["steps"]) == ({"train": 6, "eval": 1}, 2))

    await wait_until(is_read, awaited="the index is complete")
    return client


async def text(site: httpx.AsyncClient, path: str = "", **typed: Any) -> str:
    return (await site.get(path, params=typed or None)).text


async def shows(site: httpx.AsyncClient, path: str, *words: str) -> None:
    """Wait until a page has all these words."""

    async def is_there() -> bool:
        page = await text(site, path)
        return all(word in page for word in words)

    await wait_until(is_there, 60, f"{words!r} on {path}")


async def test_every_page_answers_and_holds_no_markup_of_others(site: httpx.AsyncClient, keys: Keys) -> None:
    letter = (await text(site, "/dead")).partition("/dead/")[2].partition('"')[0]
    paths = (
        "/state.html", "/groups", "/groups?lane=eval", "/groups/0", "/groups/1", "/eval-groups/0", "/steps",
        "/steps/0", "/config", "/logs", "/dead", f"/dead/{letter}", str(site.base_url).rstrip("/"),
    )  # fmt: skip
    for path in paths:
        page = await site.get(path)
        assert page.status_code == 200, (path, page.text)
        assert page.headers["content-security-policy"] == CONTENT_POLICY
        assert "<script>" not in page.text and "<img src=x" not in page.text, path
        assert "style=" not in page.text and "onclick" not in page.text, path
    page_text = await text(site, "/groups/0")
    assert "&lt;script&gt;window.hacked" in page_text and len(page_text) < 60_000
    for mark, character in (("U+202E", "\u202e"), ("NUL ESC", "\x1b")):
        assert f'<span class="ctl">{mark}</span>' in page_text and character not in page_text
    for path in ("/groups", "/dead"):
        page = await site.get(path, params=dict.fromkeys(("text", "worker", "step", "sort"), TYPED))
        assert page.status_code == 200 and "<script>window" not in page.text, path
        assert "&#34;&gt;&lt;script&gt;" in page.text, "what was typed comes back as text"
    assert f'href="/run/{keys.run_id}"' in await text(site, "http://127.0.0.1/")
    assert (await site.get(str(site.base_url))).status_code == 200, "with a slash too"


async def test_what_is_not_there_is_said(site: httpx.AsyncClient) -> None:
    for path in (
        "/steps/9999", "/dead/9-9", "/groups/0/77/tokens", "/logs/a.log",
        "/nothing", "/nothing/3", "http://127.0.0.1/run/..%2f..%2fetc",
    ):  # fmt: skip
        answer = await site.get(path)
        assert answer.status_code == 404 and "This cannot be shown" in answer.text, path
        assert "data-wait" not in answer.text, path


async def test_what_may_come_says_when_and_waits_for_it(site, broker, keys, tmp_path):
    config = yaml.safe_load((tmp_path / keys.run_id / "config.yaml").read_text())["trainer"]
    at_step = 70 // config["groups_per_step"]
    for path, words in {
        "/groups/70": f"the newest is 5, at step 2; with 64 groups a step it comes about step {at_step}",
        f"/groups/{64 * 5000}": "it will hardly come",
        "/groups/70.json": "the newest is 5",
        "/eval-groups/7": "Evaluation ticket 7 is not issued yet: the newest is 0",
        "/steps/99": "Step 99 has no commit yet: the run has done 2 steps of",
    }.items():
        words = words.replace("64", str(config["groups_per_step"]))
        answer = await site.get(path.replace("64", str(config["groups_per_step"])))
        assert answer.status_code == 404 and words in answer.text, (path, answer.text)
        assert "This is not there yet" in answer.text and "data-wait" in answer.text, path
    await append_numbered(broker, keys.prompts(), [(70, make_ticket(70))])
    await shows(site, "/groups/70", "0 of 2 completions so far, 0 of them scored", "data-wait")
    assert "data-wait" not in await text(site, "/groups/0"), "a group that has all its scores"


async def test_texts_and_tokens_come_in_parts_with_all_that_is_known_of_them(site, broker, keys):
    page = await text(site, "/groups/0/3/text?first=99990")
    assert 'data-next="100004" data-total="100004"' in page and len(page) < 300
    page = await text(site, "/groups/2/1/tokens?first=3&count=2")
    assert 'data-next="5" data-total="6"' in page and page.count("<span") == 2, "of which texts are not known"
    assert re.findall(r">(\d+)</span>", page) == ["8", "9"] and page.count('data-from="1"') == 1
    assert "untrained" in await text(site, "/groups/2/1/tokens?first=5")
    await append_numbered(broker, keys.prompts(), [(6, make_ticket(6))])
    await append(broker, keys.trajectories(), session(6, 0))
    order = ("I ask the calculator.", "17 * 23", "391 exactly", "The product is 391.", "Fork 1", "14 tokens")
    await shows(site, "/groups/6", *order, "✂ max tokens")
    page = await text(site, "/groups/6")
    assert "<script>window" not in page and "<img src=x" not in page and "\u202e" not in page
    assert page.count('<details class="turn">') == 3
    assert page.count('class="tokens"') == 2 and 'data-segment="1"' in page, "its fork beside it"
    page = await text(site, "/groups/6/0/tokens")
    assert page.count("<span") == 10 and page.count("environment") == 2 * 3
    fork = await text(site, "/groups/6/0/tokens?segment=1")
    assert re.findall(r">(\d+)</span>", fork) == ["50", "51", "52", "53"]
    assert (await site.get("/groups/6/0/tokens?segment=2")).status_code == 404


async def test_pictures_stand_beside_the_tokens_of_their_prompt(site, broker, keys, tmp_path):
    store = ImageStore(tmp_path / keys.run_id)
    pngs = [file_of(noise(56, 40, seed)) for seed in range(4)]
    ticket = seeing_question(6, store, pngs[0], pngs[1])
    large = seeing_question(7, store, pngs[2])
    too_large = large.images[0].model_copy(update={"num_bytes": MAX_PICTURE_BYTES + 1})
    large = large.model_copy(update={"images": (too_large,)})
    elsewhere = store.put(pngs[3])
    await append_numbered(broker, keys.prompts(), [(6, ticket), (7, large)])
    first, second = ticket.images
    address = f"/run/{keys.run_id}/groups/6/pictures"
    words = ("1 · 56 × 40 · tokens 1–2", "2 · 56 × 40 · tokens 4–5", "[picture]\n[picture]\nhow many?")
    await shows(
        site, "/groups/6", *words, *(f'src="{address}/{image.digest}.png"' for image in ticket.images)
    )
    page = await text(site, "/groups/6")
    recorded = page.partition("What became of it")[2]
    assert "56 x 40, tokens 1 to 2" in recorded and f'href="{address}/{first.digest}.png"' in recorded
    assert "<script>window" not in page and "'type'" not in page.partition("More of the row")[0]
    for image, png in zip(ticket.images, pngs, strict=False):
        answer = await site.get(f"/groups/6/pictures/{image.digest}.png")
        assert answer.status_code == 200 and answer.content == png
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == CONTENT_POLICY
        assert answer.headers["cache-control"] == "no-store"
    (store.folder / f"{first.digest}.png").unlink()
    (store.folder / f"{second.digest}.png").write_bytes(pngs[0])
    for path, reason in {
        f"/groups/6/pictures/{elsewhere}.png": "Ticket 6 has no such picture",
        f"/groups/0/pictures/{second.digest}.png": "Ticket 0 has no such picture",
        "/groups/6/pictures/..%2f..%2fconfig.yaml.png": "This cannot be shown",
        f"/groups/6/pictures/{first.digest}": "This cannot be shown",
        f"/groups/6/pictures/{first.digest}.png": "is missing",
        f"/groups/6/pictures/{second.digest}.png": "does not match its digest",
        f"/groups/7/pictures/{too_large.digest}.png": "too many for a page",
    }.items():
        answer = await site.get(path)
        assert answer.status_code == 404 and reason in answer.text, (path, answer.text)
    store.folder.rename(tmp_path / "away")
    answer = await site.get(f"/groups/6/pictures/{first.digest}.png")
    assert answer.status_code == 503 and "cannot be read now" in answer.text


async def test_pictures_of_a_history_that_was_scored_again_are_those_of_its_run(site, broker, keys, tmp_path):
    png = file_of(noise(56, 40))
    (tmp_path / "first").mkdir()
    ticket = seeing_question(6, ImageStore(tmp_path / "first"), png)
    await append_numbered(broker, keys.prompts(), [(6, ticket)])
    await update_state(broker, keys, **{PICTURES_OF: "first"})
    address = f"/groups/6/pictures/{ticket.images[0].digest}.png"
    await shows(site, "/groups/6", f'src="/run/{keys.run_id}{address}"')
    assert (await site.get(address)).content == png


@pytest.mark.parametrize("is_scored_again", [False, True])
async def test_pictures_that_a_session_shows_later_stand_beside_its_completion(
    site, broker, keys, tmp_path, is_scored_again: bool
):
    """A history that was scored again has no tickets, and another run's pictures."""
    run_with_pictures = "first" if is_scored_again else keys.run_id
    (tmp_path / run_with_pictures).mkdir(exist_ok=True)
    await update_state(broker, keys, **{PICTURES_OF: run_with_pictures})
    store = ImageStore(tmp_path / run_with_pictures)
    first_png = file_of(noise(56, 40, 0))
    later_png = file_of(noise(30, 20, 1))
    ticket = seeing_question(6, store, first_png)
    (first,) = ticket.images
    later = first.model_copy(
        update={"digest": store.put(later_png), "num_bytes": len(later_png), "width": 30, "height": 20}
    )
    images = (
        first,
        # Tokens of the environment, between the turns.
        later.model_copy(update={"first": len(ticket.prompt_ids) + 5}),
        first.model_copy(update={"segment": 1}),
    )
    block = {"type": "image", "digest": later.digest, "num_bytes": 9, "width": 30, "height": 20}
    messages = [
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": [{"type": "text", "text": f"there: {SCRIPT}"}, block]},
        {"role": "assistant", "content": "I see."},
    ]
    sample = completion(6, 0, "").model_copy(update={"prompt_ids": ticket.prompt_ids})
    sample = as_session(sample, messages=tuple(messages)).model_copy(update={"images": images})
    if not is_scored_again:
        await append_numbered(broker, keys.prompts(), [(6, ticket)])
    await append(broker, keys.trajectories(), sample)
    address = f"/run/{keys.run_id}/groups/6/pictures"
    of_later = f'src="{address}/{later.digest}.png" alt="Picture 2"'
    await shows(site, "/groups/6", of_later, "2 · 30 × 20 · tokens 10–11", "3 · 56 × 40 · fork 1, tokens 1–2")
    page = await text(site, "/groups/6")
    prompt, _, completions = page.partition('id="completions-title"')
    assert first.digest in prompt and later.digest not in prompt
    assert "[picture]" in completions and "<script>window" not in page
    answer = await site.get(f"/groups/6/pictures/{later.digest}.png")
    assert answer.status_code == 200 and answer.content == later_png
    for path in ("/groups/6/0/tokens", "/groups/6/0/tokens?segment=1", "/groups/6.json"):
        assert (await site.get(path)).status_code == 200, path


async def test_groups_are_filtered_sorted_and_kept_as_files(site: httpx.AsyncClient) -> None:
    for query, tickets in {
        "": [5, 4, 3, 2, 1, 0],
        "sort=reward&order=up": [0, 1, 2, 3, 4, 5],
        "step=1": [3, 2],
        "reward=2..4": [3, 2],
        "state=scored": [5, 4],
        "state=failed": [1],
        "state=flat": [],
        "worker=rollout-1": [5, 3, 1],
        "text=QUESTION+4": [4],
        "version=1..": [5, 4, 3, 2, 1, 0],
        "length=7..": [],
    }.items():
        page = await text(site, f"/groups?{query}")
        cells = [
            int(row.partition("</a>")[0].rpartition(">")[2]) for row in page.split('<th scope="row"')[1:]
        ]
        trees = (await site.get(f"/groups.json?{query}")).json()
        assert cells == [tree["ticket"] for tree in trees] == tickets, query
    assert "reward must be a number" in await text(site, "/groups?reward=high")
    answer = await site.get("/groups.csv?reward=2..4&sort=reward&order=up")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["ticket"] for row in rows] == ["2", "3"] and rows[0]["reward_mean"] == "2.15"
    assert rows[0]["prompt"] == f"question 2 {SCRIPT}" and rows[0]["state"] == "trained"
    whole = (await site.get("/groups/1.json")).json()
    assert whole["number"] == 1 and whole["samples"][0]["trajectory"]["completion_ids"] == [5, 6, 7, 8, 9, 10]
    parts = "".join([chunk async for chunk in csv_file("x", ("a",), iter([("=1+1", -2)])).body_iterator])
    assert parts == "a\r\n'=1+1,-2\r\n", "no text becomes a formula"


async def test_a_group_and_a_step_tell_where_they_came_from_and_where_they_went(site):
    for path, expected in {
        "/groups/1": (
            "row 1 of the data", "0 → 1", "judge said", "words of the judge", "failed score", "+0.75",
            'href="#c3"', "/steps/0", "0123456789ab", "dead letter", "advantages fall where its rewards rise",
        ),
        "/steps/0": (
            "waiting and all else", "25%", "1.0 1.1 1.2<", "<bdi>1.3</bdi></a>", "failed score", "+0.75",
        ),
    }.items():  # fmt: skip
        page = await text(site, path)
        assert [words for words in expected if words not in page] == [], path
    assert "advantages fall" not in await text(site, "/groups/5")
    for sort, first in (("reward", "1.2"), ("length", "1.0")):
        assert f">{first}</a>" in (await text(site, f"/groups/1?sort={sort}")).partition("<h3")[2][:80]


async def test_a_live_run_is_followed(site: httpx.AsyncClient, broker: Broker, keys: Keys) -> None:
    counts = {"weights_bytes": 2_500_000.0, "weights_changed": 0.014}
    await publish_heartbeat(broker, keys, Heartbeat("t", "trainer", counts=counts))
    await append_numbered(broker, keys.prompts(), [(n, make_ticket(n)) for n in (6, 7)])
    await append(broker, keys.trajectories(), completion(6, 2, f"fresh {SCRIPT}"))
    await append_numbered(broker, keys.commits, [(4, commit_of(4))])
    await shows(site, "/groups/6", "fresh", "1 <small>of 4</small>")
    await shows(site, "/groups/7", "0 of 2 completions so far")
    await shows(site, "/groups/8", "entries were trimmed")
    await shows(site, "/state.html", "2.5 MB, 1.4% changed")


async def test_runs_of_redis_are_listed_and_compared_by_their_commits(site, broker, keys, tmp_path):
    address = f"http://127.0.0.1/compare{{}}?run={keys.run_id}&run=gone&metric=reward"
    tree = (await site.get(address.format(".json"))).json()
    assert [line["points"] for line in tree["charts"][0]["lines"]] == [[[0, 0.5], [1, 1.5]]]
    first = (await site.get(f"http://127.0.0.1/compare.json?run={keys.run_id}")).json()
    assert [chart["key"] for chart in first["charts"]] == ["reward", "kl"], "where the address names none"
    typed = {"run": [keys.run_id, "gone"], "metric": TYPED, "text": TYPED}
    page = await text(site, "http://127.0.0.1/compare", **typed)
    assert "no run <bdi>gone</bdi> here" in page and "<script>window" not in page and "&lt;script&gt;" in page
    shutil.rmtree(tmp_path / keys.run_id)
    await publish_config(broker, keys, run_config(tmp_path))
    await broker.execute("SADD", RUNS, "invented")  # somebody only named it
    catalog = Catalog(tmp_path)
    listed = [line.run_id for line in await catalog.lines() if line.run_id in (keys.run_id, "invented")]
    assert listed == [keys.run_id]
    assert await catalog.exists(keys.run_id) and not await catalog.exists("invented")
    await broker.execute("SREM", RUNS, "invented")


def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of the list of runs, as text, by run."""
    rows = {}
    for row in page.partition("<tbody>")[2].split("</tr>")[:-1]:
        cells = [re.sub(r"<[^>]+>", "", cell).split() for cell in re.split(r"</t[hd]>", row)]
        texts = [" ".join(cell) for cell in cells[1:-1]]
        rows[texts[0]] = texts[1:]
    return rows


async def test_every_run_has_its_state_and_numbers_in_the_list(site, broker, keys, tmp_path):
    evaluations = [{"version": 2, "set": "a", "score": 0.25}, {"version": 2, "set": "b", "score": 0.75}]
    await update_state(broker, keys, evaluations=evaluations)
    for name, rewards in {
        "stopped": [0.5, 1.5],
        "failed": [],
        "finished": [0.25],
        "goes-on": [0.25, 0.5],
    }.items():
        write_folder(tmp_path, Keys(name))
        write_metrics(tmp_path / name, rewards)
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(item | {"kind": "evaluation", "time": 1.0}) + "\n" for item in evaluations)
        file.write('{"kind": "step", "step": 7, "rew')  # is being written
    end = {"reason": "trainer cannot do this run", "error": f"no column {SCRIPT}", "of_steps": 10}
    (tmp_path / "failed" / "end.json").write_text(json.dumps(end | {"status": "failed"}))
    report = {"steps": 1, "reward_first": 0.25, "reward_last": 0.25, "eval_after": 0.125}
    for name in ("finished", "goes-on"):
        (tmp_path / name / "summary.json").write_text(json.dumps(report | {"ok": True}))
    (tmp_path / "goes-on" / "end.json").write_text(json.dumps({"status": "stopped"}))
    for path in (tmp_path / "stopped").iterdir():
        os.utime(path, (1, 1))
    rows = rows_of(await text(site, "http://127.0.0.1/"))
    steps = yaml.safe_load((tmp_path / "stopped" / "config.yaml").read_text())["trainer"]["steps"]
    for name, expected in {
        keys.run_id: ["running", f"2 of {steps}", "0.5", "1.5", "0.5"],  # the folder has no file of numbers
        "stopped": ["stopped", f"2 of {steps}", "0.5", "1.5", "0.5"],
        "failed": ["failed no column &lt;script&gt;", f"0 of {steps}", "–", "–", "–"],
        "finished": ["finished", f"1 of {steps}", "0.25", "0.25", "0.125"],
        "goes-on": ["stopped", f"2 of {steps}", "0.25", "0.5", "–"],  # its summary is from before
    }.items():
        assert rows[name][0].startswith(expected[0]) and rows[name][1:5] == expected[1:], (name, rows[name])
    shutil.rmtree(tmp_path / keys.run_id)
    assert rows_of(await text(site, "http://127.0.0.1/"))[keys.run_id][:5] == rows[keys.run_id][:5]


async def leave_a_run(
    tmp_path: Path,
    *,
    archived: bool = False,
    state: dict[str, Any] | None = None,
    more: Sequence[Ticket] = (),
) -> EmbeddedRedis:
    """A run whose own Redis was stopped; `state` is what its state says beside `running`, `more` are further
    tickets."""
    config = write_folder(tmp_path, ENDED)
    redis = EmbeddedRedis(tmp_path / "ended" / "redis")
    redis.start()
    broker = await Broker.connect(redis.url)
    await write_run(broker, ENDED, config)
    await append_numbered(broker, ENDED.prompts(), [(ticket.ticket, ticket) for ticket in more])
    await update_state(broker, ENDED, **(state or {"status": "running"}))
    for stream in StreamName if archived else ():
        await archive(broker, ENDED, tmp_path / "ended", stream)
    await broker.close()
    redis.stop()
    return redis


@pytest.fixture
def ended(browse: Any, monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    """On a run whose Redis is gone."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    return browse("ended")  # type: ignore[no-any-return]


async def test_what_a_redis_left_is_shown_and_released_when_nobody_looks(ended, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "REFRESH_STILL_S", 0.05)
    redis = await leave_a_run(tmp_path)
    await shows(ended, "/groups/0", "words of the judge")
    await shows(ended, "/groups", "6 groups")
    await shows(ended, "", "lost")
    monkeypatch.setattr(runs, "UNWATCHED_S", 0.0)

    def is_free() -> bool:
        try:
            redis.start()
        except Exception:
            return False
        redis.stop()
        return True

    await wait_until(lambda: asyncio.to_thread(is_free), awaited="the run could be resumed")
    monkeypatch.setattr(runs, "UNWATCHED_S", 90.0)
    await shows(ended, "/groups/1", "words of the judge")


async def test_a_run_of_which_only_the_archive_is_left_is_all_there(ended, tmp_path):
    await leave_a_run(tmp_path, archived=True)
    shutil.rmtree(tmp_path / "ended" / "redis")
    await shows(ended, "", "the archive in")
    await shows(ended, "/groups/0", "words of the judge")
    await shows(ended, "/groups/1", "dead letter")
    await shows(ended, "/eval-groups/0", "an answer of the evaluation")
    await shows(ended, "/steps/1", "2 groups, in the order")


async def test_the_archive_alone_shows_pictures(ended, tmp_path):
    png = file_of(noise(30, 20))
    (tmp_path / "ended").mkdir()
    ticket = seeing_question(6, ImageStore(tmp_path / "ended"), png)
    await leave_a_run(tmp_path, archived=True, more=[ticket])
    shutil.rmtree(tmp_path / "ended" / "redis")
    address = f"/groups/6/pictures/{ticket.images[0].digest}.png"
    await shows(ended, "/groups/6", f'src="/run/ended{address}"', "tokens 1–2")
    assert (await ended.get(address)).content == png


WARNING = {"text": "entropy is low", "advice": "Raise it.", "since_step": 0, "until_step": 1, "worst": 0.01}


async def test_a_finished_run_keeps_its_warnings_and_its_verdict(ended, tmp_path):
    await leave_a_run(tmp_path, archived=True)
    shutil.rmtree(tmp_path / "ended" / "redis")
    report = {
        "steps": 2, "warnings": [WARNING], "ok": False, "failures": ["the evaluation went down"],
        "learning": {"verdict": "fell", "text": "the reward fell"},
    }  # fmt: skip
    (tmp_path / "ended" / "summary.json").write_text(json.dumps(report))
    words = (
        "entropy is low (steps 1 to 1, at worst 0.01). Raise it.",
        "the evaluation went down",
        "the reward fell",
    )
    await shows(ended, "", *words, 'class="state ended"')
    assert "left</p>" not in await text(ended, "/state.html"), "no time is left of a run that is over"
    (row,) = rows_of(await text(ended, "http://127.0.0.1/")).values()
    assert row[0] == "ended the evaluation went down"


async def test_a_stopped_run_keeps_its_warnings_and_says_how_to_go_on(ended, tmp_path):
    await leave_a_run(tmp_path, state={"warnings": [WARNING], "status": "stopped"})
    end = {"status": "stopped", "steps": 2, "of_steps": 9, "at": 1.0, "resume": "tidemill up c.yaml --resume"}
    (tmp_path / "ended" / "end.json").write_text(json.dumps(end | {"log": "runs/ended/logs/trainer.log"}))
    await shows(ended, "", "entropy is low", "tidemill up c.yaml --resume", "Stopped after 2 of 9 steps")
    assert 'href="/run/ended/logs/trainer.log"' in await text(ended)


async def test_a_run_whose_launcher_was_killed_is_not_running(ended, tmp_path):
    await leave_a_run(tmp_path)
    await shows(ended, "", "the data in", 'class="state lost"')


async def test_a_copied_run_shows_texts_also_without_the_model(ended, tmp_path):
    await leave_a_run(tmp_path, archived=True)
    await shows(ended, "/groups/0", 'data-first="text"', "tokenizer is not on this machine")
    assert re.search(r'value="text" checked', await text(ended, "/groups/0"))


async def test_a_runs_folder_has_the_tokenizer_that_its_tokens_need(ended, tmp_path):
    config = make_config(model={"path": str(MODEL)}, run_id="ended")
    RunFolder(tmp_path, "ended").create(config)
    await leave_a_run(tmp_path, archived=True)  # its config names a model that is not there
    await shows(ended, "/groups/0", 'data-first="tokens"')
    assert 'id">' not in await text(ended, "/groups/2/1/tokens"), "texts, not ids"


async def test_while_redis_is_away_a_live_run_waits_and_then_goes_on(browse, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RETRY_S", 0.05)
    config = write_folder(tmp_path, ENDED)
    redis = EmbeddedRedis(tmp_path / "elsewhere", listen=f"127.0.0.1:{free_port()}")
    redis.start()
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis.url)
    broker = await Broker.connect(redis.url)
    await write_run(broker, ENDED, config)
    page = browse("ended")
    await shows(page, "", "Live", 'class="state running"')
    redis.kill()
    await shows(page, "", "Redis has not answered for")
    await shows(page, "", "This run cannot be read now", "data-wait", 'class="state running"')
    charts = (await page.get("/charts.json")).json()
    assert charts["changes"], "the page asks again"
    assert charts["problem"]
    assert (await page.get("/groups/0")).status_code in (200, 503)
    redis.start()

    async def is_read_again() -> bool:
        return "cannot be read" not in await text(page) and (await page.get("/groups/0")).status_code == 200

    await wait_until(is_read_again, awaited="the run is shown again")
    assert not (await page.get("/charts.json")).json()["problem"]
    await broker.close()
    redis.stop()


async def test_a_config_that_is_not_understood_is_named_and_the_run_shown_once_it_is(
    ended, tmp_path, monkeypatch
):
    monkeypatch.setattr(runs, "RETRY_S", 0.05)
    write_folder(tmp_path, ENDED)
    config = tmp_path / "ended" / "config.yaml"
    good = config.read_text()
    config.write_text("trainer: {steps: -1, <b>: 2}")
    await shows(ended, "", "This run cannot be read now", "trainer.steps")
    assert "<b>" not in (await text(ended, "/groups")).partition("<main")[0]
    (tmp_path / "ended" / "metrics.jsonl").write_text('{"kind": "step", "step": 0, "reward": 0.125}\n')
    config.write_text(good)
    await shows(ended, "/steps", "0.125")


def write_metrics(folder: Path, rewards: list[float]) -> None:
    steps = [{"kind": "step", "step": s, "time": 1.7e9 + s, "reward": r} for s, r in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step | {"loss": None}) + "\n" for step in steps))


async def test_a_run_of_which_only_the_folder_is_left_has_its_curves(ended, tmp_path):
    write_folder(tmp_path, ENDED)
    write_metrics(tmp_path / "ended", [s / 4 for s in range(4)])
    await shows(ended, "/steps/3", "0.75")
    await shows(ended, "", "Only the run's folder can be shown", "nothing is left of the streams")
    charts = (await ended.get("/charts.json")).json()["charts"]
    assert charts[0]["lines"][0]["points"][-1] == [3, 0.75]
    assert "Nothing is left of the groups" in await text(ended, "/groups")
    assert "nothing is left of its groups" in await text(ended, "/groups/3")
    for path in ("", "/groups", "/groups/3", "/steps", "/steps/3", "/config", "/dead"):
        assert "data-wait" not in await text(ended, path), "nobody comes back for it"
    assert (await text(ended, "/metrics.csv")).splitlines()[4].startswith("3,")
    assert len((await ended.get("/metrics.json")).json()["steps"]) == 4
    assert "trainer.optimizer.lr" in await text(ended, "/config?text=optimizer")
    assert yaml.safe_load(await text(ended, "/config.yaml"))["run_id"] == "ended"
    assert (await ended.get("/dead")).status_code == 503
    changed = yaml.safe_load((tmp_path / "ended" / "config.yaml").read_text()) | {"seed": 77}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text(yaml.safe_dump(changed))
    write_metrics(tmp_path / "other", [-s for s in range(2000)])
    address = "http://127.0.0.1/compare{}?run=ended&run=other&metric=reward"
    (chart,) = (await ended.get(address.format(".json") + "&smooth=0.5")).json()["charts"]
    first, second = chart["lines"]
    assert first["raw"][-1] == [3, 0.75] and second["raw"][-1] == [1999, -1999]
    assert len(second["points"]) <= MAX_POINTS
    page = await text(ended, address.format(""))
    assert "1 field<" in page and "seed" in page and "77" in page and "−1\u202f999" in page
    rows = (await text(ended, address.format(".csv"))).splitlines()
    assert rows[:2] == ["run,metric,step,seconds,value", "ended,reward,0,0.0,0.0"] and len(rows) == 2005


async def test_of_the_folder_only_plain_logs_are_sent(ended: httpx.AsyncClient, tmp_path: Path) -> None:
    write_folder(tmp_path, ENDED)
    logs = tmp_path / "ended" / "logs"
    logs.mkdir()
    (logs / "trainer.log").write_text("".join(f"line {n} <b>\n" for n in range(20_000)))
    (logs / "secret.log").symlink_to("/etc/hostname")
    (logs / '"><img src=x>\n.log').write_text("not a name of ours")
    newest = await text(ended, "/logs/trainer.log")
    assert "line 19999 &lt;b&gt;" in newest and "line 1 " not in newest
    assert "secret" not in newest and "img" not in newest.partition("<main")[2]
    earlier = newest.partition("?end=")[2].partition('"')[0]
    page = await text(ended, f"/logs/trainer.log?end={earlier}&text=LINE+1")
    assert "earlier</a>" in page and "line 19999" not in page and "line 1" in page
    assert (await text(ended, "/logs/trainer.log?file=1")).endswith("line 19999 <b>\n")
    for name in ("secret.log", "..%2fconfig.yaml", "..%2f..%2fetc%2fpasswd", ".hidden"):
        assert (await ended.get(f"/logs/{name}")).status_code == 404, name
