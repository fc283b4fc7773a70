"""`tidemill web`: what its pages say of a run in Redis, and that nothing on them takes effect."""

import csv
import io
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import SERVERS
from tests.support.numbered import append_numbered
from tests.support.waiting import wait_until
from tests.support.web_runs import (
    SCRIPT,
    commit_of,
    completion,
    make_ticket,
    session,
    write_folder,
    write_run,
)
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.services.console.web.runs import Catalog
from tidemill.services.console.web.server import CONTENT_POLICY, Access, create_app
from tidemill.services.console.web.site import csv_file

# What differs between servers is hidden by `History`, and tested there.
pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


@pytest.fixture
async def site(
    redis_server: EmbeddedRedis, broker: Broker, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A browser's view of a run; addresses are below the run's."""
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    await write_run(broker, keys, write_folder(tmp_path, keys))
    catalog = Catalog(tmp_path)
    app = create_app(catalog, Access.of("127.0.0.1"))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    base = f"http://127.0.0.1/run/{keys.run_id}"
    async with httpx.AsyncClient(transport=transport, base_url=base, timeout=60) as client:
        await wait_until(lambda: _is_read(client), what="the index is complete")
        yield client
    await catalog.close()


async def _is_read(client: httpx.AsyncClient) -> bool:
    answer = (await client.get("/changes.json")).json()
    return bool(answer["groups"]["train"] == 6 and answer["groups"]["eval"] == 1 and answer["steps"] == 2)


async def test_every_page_answers_and_holds_no_markup_of_others(site: httpx.AsyncClient) -> None:
    letter = (await site.get("/dead")).text.partition("/dead/")[2].partition('"')[0]
    paths = (
        "/state.html",
        "/groups",
        "/groups?lane=eval",
        "/groups/0",
        "/groups/1",
        "/eval-groups/0",
        "/steps",
        "/steps/0",
        "/config",
        "/logs",
    )
    for path in (*paths, "/dead", f"/dead/{letter}", str(site.base_url).rstrip("/")):
        page = await site.get(path)
        assert page.status_code == 200, (path, page.text)
        assert page.headers["content-security-policy"] == CONTENT_POLICY
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "no-referrer"
        assert "<script>" not in page.text and "<img src=x" not in page.text, path
        assert "style=" not in page.text and "onclick" not in page.text, path
    assert "&lt;script&gt;window.hacked" in (await site.get("/groups/0")).text


async def test_what_a_version_of_the_weights_costs_is_shown_of_a_live_run(
    site: httpx.AsyncClient, broker: Broker, keys: Keys
) -> None:
    counts = {"weights_bytes": 2_500_000.0, "weights_changed": 0.014, "weights_encode_s": 0.3}

    async def is_shown() -> bool:
        await publish_heartbeat(broker, keys, Heartbeat("t", "trainer", counts=counts))
        return "2.5 MB, 1.4% changed" in (await site.get("/state.html")).text

    await wait_until(is_shown)


async def test_characters_that_nobody_sees_are_shown(site: httpx.AsyncClient) -> None:
    page = (await site.get("/groups/0")).text
    assert "\u202e" not in page and '<span class="ctl">U+202E</span>' in page
    assert "\x1b" not in page and '<span class="ctl">NUL ESC</span>' in page


async def test_a_long_completion_comes_in_parts(site: httpx.AsyncClient) -> None:
    page = await site.get("/groups/0")
    assert len(page.text) < 60_000
    part = (await site.get("/groups/0/3/text.json?first=99990")).json()
    assert part["total"] == part["next"] == 100_004 and len(part["text"]) == 14


async def test_tokens_come_with_all_that_is_known_of_them(site: httpx.AsyncClient) -> None:
    part = (await site.get("/groups/2/1/tokens.json?first=3&count=2")).json()
    assert part["ids"] == [8, 9] and part["versions"] == [0, 1] and part["logprobs"] == [-2.5, -4.0]
    assert part["pieces"] is None and part["total"] == 6
    assert (await site.get("/groups/2/1/tokens.json?first=5")).json()["trained"] == [0]


async def test_a_session_is_folded_by_turns_and_its_tokens_are_told_apart(
    site: httpx.AsyncClient, broker: Broker, keys: Keys
) -> None:
    await append_numbered(broker, keys.prompts(), [(6, make_ticket(6))])
    await append(broker, keys.trajectories(), session(6, 0))

    async def is_there() -> bool:
        return (await site.get("/groups/6")).status_code == 200

    await wait_until(is_there)
    page = (await site.get("/groups/6")).text
    assert "<script>window" not in page and "<img src=x" not in page and "\u202e" not in page
    assert page.count('<details class="turn">') == 3 and page.count("said call") == 1
    order = ["I ask the calculator.", "17 * 23", "391 exactly", "The product is 391.", "Fork 1", "14 tokens"]
    assert all(words in page for words in order) and "✂ max tokens" in page
    assert page.count('class="tokens"') == 2 and 'data-segment="1"' in page, "its fork beside it"
    part = (await site.get("/groups/6/0/tokens.json?first=3&count=5")).json()
    assert part["turns"] == [0, -1, -1, -1, 1] and part["trained"] == [1, 0, 0, 0, 1] and part["total"] == 10
    fork = (await site.get("/groups/6/0/tokens.json?segment=1")).json()
    assert fork["ids"] == [50, 51, 52, 53] and fork["versions"] == [3] * 4 and fork["turns"] == [0, 0, 0, -1]
    assert (await site.get("/groups/6/0/tokens.json?segment=2")).status_code == 404
    assert (await site.get("/groups/2/1/tokens.json")).json()["turns"] is None


async def test_groups_are_filtered_sorted_and_addressed(site: httpx.AsyncClient) -> None:
    async def tickets(query: str) -> list[int]:
        rows = (await site.get(f"/groups?{query}")).text.split('<th scope="row"')[1:]
        return [int(row.partition("</a>")[0].rpartition(">")[2]) for row in rows]

    assert await tickets("") == [5, 4, 3, 2, 1, 0]
    assert await tickets("sort=reward&order=up") == [0, 1, 2, 3, 4, 5]
    assert await tickets("step=1") == [3, 2]
    assert await tickets("reward=2..4") == [3, 2]
    assert await tickets("state=scored") == [5, 4]
    assert await tickets("state=failed") == [1]
    assert await tickets("worker=rollout-1") == [5, 3, 1]
    assert await tickets("text=QUESTION+4") == [4]
    assert await tickets("version=1..") == [5, 4, 3, 2, 1, 0]
    assert await tickets("length=7..") == []
    assert "reward must be a number" in (await site.get("/groups?reward=high")).text


async def test_what_a_visitor_typed_comes_back_as_text(site: httpx.AsyncClient) -> None:
    typed = '"><script>window.hacked = 3</script>'
    for path in ("/groups", "/dead"):
        page = await site.get(path, params={"text": typed, "worker": typed, "step": typed, "sort": typed})
        assert page.status_code == 200 and "<script>window" not in page.text, path
        assert "&#34;&gt;&lt;script&gt;" in page.text, path


async def test_a_group_tells_where_it_came_from_and_where_it_went(site: httpx.AsyncClient) -> None:
    page = (await site.get("/groups/1")).text
    for words in (
        "row 1 of the data",
        "0 → 1",
        "judge said",
        "words of the judge",
        "failed score",
    ):
        assert words in page, words
    assert "+0.75" in page and "0.1" in page and 'href="#c3"' in page
    assert "/steps/0" in page and "0123456789ab" in page and "Dead letter" in page


async def test_advantages_that_fall_where_rewards_rise_are_pointed_at(site: httpx.AsyncClient) -> None:
    assert "advantages fall where its rewards rise" in (await site.get("/groups/1")).text
    assert "advantages fall" not in (await site.get("/groups/5")).text


async def test_a_step_tells_what_went_in_and_where_the_time_went(site: httpx.AsyncClient) -> None:
    page = (await site.get("/steps/0")).text
    assert "waiting and all else" in page and "25%" in page
    assert "Update 0, micro-batch 1: 3 completions of 1 group<" in page
    assert ">1.3</a>" in page and "failed score" in page


async def test_groups_go_out_as_csv_and_json_and_no_text_becomes_a_formula(site: httpx.AsyncClient) -> None:
    answer = await site.get("/groups.csv?reward=2..4&sort=reward&order=up")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["ticket"] for row in rows] == ["2", "3"] and rows[0]["reward_mean"] == "2.15"
    assert rows[0]["prompt"] == f"question 2 {SCRIPT}" and rows[0]["state"] == "trained"
    trees = (await site.get("/groups.json?state=failed")).json()
    assert [tree["ticket"] for tree in trees] == [1] and trees[0]["num_failed"] == 1
    whole = (await site.get("/groups/1.json")).json()
    assert whole["number"] == 1 and len(whole["samples"]) == 4
    assert whole["samples"][0]["trajectory"]["completion_ids"] == [5, 6, 7, 8, 9, 10]
    parts = "".join([part async for part in csv_file("x", ("a",), iter([("=1+1", -2)])).body_iterator])
    assert parts == "a\r\n'=1+1,-2\r\n"


async def test_a_run_that_only_redis_has_is_compared_by_its_commits(
    site: httpx.AsyncClient, keys: Keys
) -> None:
    tree = (await site.get(f"http://127.0.0.1/compare.json?run={keys.run_id}&run=gone&metric=reward")).json()
    assert [line["points"] for line in tree["charts"][0]["lines"]] == [[[0, 0.5], [1, 1.5]]]
    typed = '"><script>window.hacked = 3</script>'
    address = f"http://127.0.0.1/compare?run={keys.run_id}&run=gone"
    page = (
        await site.get(address, params={"run": [keys.run_id, "gone"], "metric": typed, "text": typed})
    ).text
    assert "no run <bdi>gone</bdi> here" in page and "<script>window" not in page
    assert "&lt;script&gt;" in page and "reward" in page


async def test_what_is_not_there_is_said(site: httpx.AsyncClient) -> None:
    for path in (
        "/groups/99",
        "/steps/99",
        "/dead/9-9",
        "/groups/0/77/tokens.json",
        "/groups/99.json",
        "/logs/a.log",
        "/nothing",
    ):
        answer = await site.get(path)
        assert answer.status_code == 404 and "This cannot be shown" in answer.text, path
    missing = await site.get("http://127.0.0.1/run/..%2f..%2fetc")
    assert missing.status_code == 404


async def test_new_entries_appear_while_the_run_goes_on(
    site: httpx.AsyncClient, broker: Broker, keys: Keys
) -> None:
    await append_numbered(broker, keys.prompts(), [(6, make_ticket(6))])
    await append(broker, keys.trajectories(), completion(6, 2, f"fresh {SCRIPT}"))

    async def is_shown() -> bool:
        return "fresh" in (await site.get("/groups/6")).text

    await wait_until(is_shown, what="a group that appeared after the page was opened")
    assert "1 <small>of 4</small>" in (await site.get("/groups/6")).text


async def test_what_was_trimmed_is_told_apart_from_what_is_to_come(
    site: httpx.AsyncClient, broker: Broker, keys: Keys
) -> None:
    await append_numbered(broker, keys.prompts(), [(6, make_ticket(6))])
    await append_numbered(broker, keys.commits, [(4, commit_of(4))])

    async def is_shown() -> bool:
        return "trained" in (await site.get("/groups/8")).text

    await wait_until(is_shown, what="a group that only a commit tells of")
    assert "entries were trimmed" in (await site.get("/groups/8")).text
    assert "No completion is known yet" in (await site.get("/groups/6")).text


async def test_the_list_of_runs_has_runs_of_folder_and_redis(site: httpx.AsyncClient, keys: Keys) -> None:
    assert f'href="/run/{keys.run_id}"' in (await site.get("http://127.0.0.1/")).text
