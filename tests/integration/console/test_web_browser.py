"""`tidemill web` in a real browser: a live run, texts that attack, 50,000 groups, keys, small screens."""

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.conftest import SERVERS
from tests.support.browsers import browsing, chromium, serving
from tests.support.numbered import append_numbered
from tests.support.preloaded import REPO
from tests.support.recorded_sessions import as_session
from tests.support.runs import ServiceRun, simulated_config
from tests.support.web_runs import (
    LONG,
    RIGHT_TO_LEFT,
    commit_of,
    completion,
    question,
    score_of,
    write_folder,
    write_run,
)
from tidemill.common.run.state import publish_config
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Score, ScoreStatus

if TYPE_CHECKING:
    from playwright.async_api import Page

NUM_GROUPS = 50_000
NUM_SCORED = 970
MOST_ELEMENTS = 8_000
"""Of a page: a browser lays out so many in a fraction of a second."""

MODEL = REPO / "examples" / "arith" / "model"

CUT_OFF = """() => [...document.querySelectorAll("body *")].filter((element) => {
  const scrolls = ".scroll, .tokens, .picks, pre.text", style = getComputedStyle(element);
  const right = element.getBoundingClientRect().right;
  const hides = style.overflowX !== "visible" && element.scrollWidth > element.clientWidth + 1;
  const isTold = element.matches(`${scrolls}, .unseen`) || style.textOverflow === "ellipsis";
  const sticksOut = right > innerWidth + 1 && !element.closest(`${scrolls}, .prompt`);
  return element.checkVisibility() && (sticksOut || (hides && !isTold));
}).map((element) => element.outerHTML.slice(0, 120))"""
"""Whatever is wider than the screen, or than its box, but for boxes that show a shadow where they scroll."""

pytestmark = [
    pytest.mark.usefixtures("browser_is_there"),
    pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True),
]


@pytest.fixture
def browser_is_there() -> None:
    chromium()


async def settled(page: "Page", address: str) -> None:
    """Load a page again until the server has read the run."""
    await page.goto(address)
    while await page.get_by_text("still being read").count():
        await asyncio.sleep(0.2)
        await page.reload()


async def text_of(page: "Page", selector: str) -> str:
    return await page.locator(selector).first.inner_text()


async def test_a_live_run_is_followed_without_loading_again(tmp_path, redis_server, keys):
    config = simulated_config(tmp_path, trainer__steps=6)
    async with (
        ServiceRun(tmp_path, config, keys.run_id, redis_server.url) as run,
        serving(tmp_path, run.url, keys.run_id) as base,
        browsing() as page,
    ):
        await page.goto(f"http://{base}")
        await page.evaluate("window.same = true")
        run.start("trainer")
        run.start("rollout")
        await page.locator("#state td", has_text="wait").first.wait_for()
        await page.locator("#state th", has_text="rollout").wait_for()
        assert await page.locator(".chart").count() == 0, "nothing is committed without rewards"
        run.start("reward")
        await page.locator(".chart path.line").first.wait_for(state="attached")
        await page.locator("#head .state.finished").wait_for()
        assert await page.evaluate("window.same") is True
        assert "step 6 of 6" in await text_of(page, "#head")
        await page.keyboard.press("g")
        await page.wait_for_url("**/groups")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.locator(".tokens .t").first.wait_for()


async def test_an_early_link_opens_by_itself_once_there_is_what_it_names(
    tmp_path, redis_server, broker, keys
):
    await write_run(broker, keys, write_folder(tmp_path, keys, MODEL), texts=["short"])
    missing = "the server responded with a status of 404"
    async with (
        serving(tmp_path, redis_server.url, keys.run_id) as base,
        browsing(expected=missing) as page,
        browsing(expected=missing) as second,
    ):
        await page.goto(f"http://{base}/groups/6")
        await page.get_by_text("Ticket 6 is not issued yet").wait_for()
        await second.goto(f"http://{base}/steps/2")
        await second.get_by_text("Step 2 has no commit yet").wait_for()
        await append_numbered(broker, keys.prompts(), [(6, question(6))])
        await page.get_by_text("0 of 4 completions so far").wait_for()
        await append(broker, keys.trajectories(), *(completion(6, i, f"text {i}") for i in range(4)))
        await page.get_by_text("4 of 4 completions so far, 0 of them scored").wait_for()
        await page.mouse.click(5, 5)  # somebody reads: the page does not change under the reader's eyes
        await append(broker, keys.scores(), *(score_of(6, index) for index in range(4)))
        await page.get_by_role("link", name="There is more now: load again").click()
        await page.locator("article.sample", has_text="reward 6.3").wait_for()
        assert await page.locator("[data-wait]").count() == 0
        await append_numbered(broker, keys.commits, [(2, commit_of(2))])
        await second.get_by_role("heading", name="Step 2").wait_for()


async def test_curves_and_links_are_seen_as_such_at_once(tmp_path, redis_server, broker, keys):
    await write_run(broker, keys, write_folder(tmp_path, keys, MODEL), texts=["short"])
    (tmp_path / keys.run_id / "logs").mkdir()
    (tmp_path / keys.run_id / "logs" / "trainer.log").write_text("word\n")
    async with serving(tmp_path, redis_server.url, keys.run_id) as base, browsing() as page:
        await settled(page, f"http://{base}")
        await page.locator(".chart path.line").first.wait_for(state="attached")
        assert await page.evaluate(
            "document.querySelector('.chart').getBoundingClientRect().bottom <= innerHeight"
        )
        for path, selector in (("", ".counts a"), ("/logs", ".counts a"), ("/steps", "tbody th a")):
            await page.goto(f"http://{base}{path}")
            style = await page.locator(selector).first.evaluate(
                "(link) => [getComputedStyle(link).color, getComputedStyle(document.body).color,"
                " getComputedStyle(link).textDecorationLine]"
            )
            assert style[0] != style[1] and style[2] == "underline", (path, style)


async def test_hostile_completions_are_shown_and_do_nothing(tmp_path, redis_server, broker, keys):
    await write_run(broker, keys, write_folder(tmp_path, keys, MODEL))
    async with serving(tmp_path, redis_server.url, keys.run_id) as base, browsing() as page:
        await settled(page, f"http://{base}/groups/0")
        await page.locator("#c3 .tokens .t").first.wait_for()
        await page.get_by_label("text as recorded").check()
        await page.locator("#c3 button").wait_for()
        assert "<script>window.hacked" in await text_of(page, "#c0 .tokens")
        assert "U+202E" in await text_of(page, "#c1 .tokens") and RIGHT_TO_LEFT[-4:] in await text_of(
            page, "#c1 .tokens"
        )
        assert "NUL ESC[31mredBEL DEL U+0085" in await text_of(page, "#c2 .tokens")
        assert len(await text_of(page, "#c3 .tokens .text")) < len(LONG) / 4
        for _ in range(5):
            await page.locator("#c3 .tokens[aria-busy]").wait_for(state="detached")
            await page.locator("#c3 button").click()
        await page.locator("#c3 button").wait_for(state="detached")
        assert len(await text_of(page, "#c3 .tokens .text")) == len(LONG)
        for path in ("", "/groups", "/groups/1", "/steps/0", "/dead", "/eval-groups/0"):
            await page.goto(f"http://{base}{path}")
            assert await page.evaluate("window.hacked") is None, path
            assert await page.locator("script:not([src]), img[onerror]").count() == 0, path


async def test_fifty_thousand_groups_are_a_small_page_that_answers_keys(tmp_path, redis_server, broker, keys):
    await publish_config(broker, keys, write_folder(tmp_path, keys))
    ticket = question(0).model_copy(update={"group_size": 1})
    numbered = ((t, ticket.model_copy(update={"ticket": t, "step": t // 8})) for t in range(NUM_GROUPS))
    await append_numbered(broker, keys.prompts(), numbered)
    scores = (Score(ticket=t, index=0, status=ScoreStatus.OK, value=t % 97) for t in range(NUM_SCORED))
    await append(broker, keys.scores(), *scores)
    await append(broker, keys.trajectories(), completion(NUM_GROUPS - 1, 0, "the newest one"))
    async with serving(tmp_path, redis_server.url, keys.run_id) as base, browsing() as page:
        await settled(page, f"http://{base}/groups")
        assert "50\u202f000 groups" in await text_of(page, "#changes")
        assert await page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        assert await page.evaluate("document.activeElement.textContent") == str(NUM_GROUPS - 2)
        await page.keyboard.press("n")
        await page.wait_for_url("**page=2")
        await page.get_by_role("link", name="Reward", exact=True).click()
        await page.wait_for_url("**sort=reward*")
        await page.keyboard.press("j")
        assert await page.evaluate("document.activeElement.textContent") == str(NUM_SCORED - 1)
        await page.goto(f"http://{base}/groups?reward=3..3&step=..20")
        assert "2 of 50\u202f000 groups" in await text_of(page, "#changes")


async def test_a_group_is_read_with_keys_alone_and_a_session_turn_by_turn(
    tmp_path, redis_server, broker, keys
):
    await write_run(broker, keys, write_folder(tmp_path, keys, MODEL), texts=["a short one"])
    await append_numbered(broker, keys.prompts(), [(6, question(6))])
    await append(broker, keys.trajectories(), as_session(completion(6, 0, "")))
    async with serving(tmp_path, redis_server.url, keys.run_id) as base, browsing() as page:
        await settled(page, f"http://{base}/groups/2")
        await page.locator("#c0 .tokens .t").nth(5).wait_for()
        await page.keyboard.press("j")
        assert await page.evaluate("document.activeElement.id") == "c0"
        await page.locator("#c0 .tokens").focus()
        for _ in range(5):
            await page.keyboard.press("ArrowRight")
        assert "token 4 · id 9" in await text_of(page, "#tip") and "version 1" in await text_of(page, "#tip")
        assert "a-p3" in str(await page.locator("#c0").get_attribute("class"))
        for key, colour in zip("12345", ("logprob", "advantage", "version", "reward", "none"), strict=True):
            await page.keyboard.press(key)
            assert await page.evaluate("document.body.dataset.colour") == colour
        await page.keyboard.press("?")
        await page.get_by_role("dialog", name="Keys").wait_for()
        await page.keyboard.press("Escape")
        await page.keyboard.press("t")
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"
        await page.keyboard.press("n")
        await page.wait_for_url("**/groups/3*")
        await page.keyboard.press("u")
        await page.wait_for_url("**/groups")
        # A session says of its tokens whose they are, and is unfolded turn by turn.
        await page.goto(f"http://{base}/groups/6")
        sample = page.locator("#c0")
        await sample.locator(".t.environment").nth(3).wait_for()  # the last of both: boxes fill one by one
        marks = [await box.locator(".t.environment").count() for box in await sample.locator(".tokens").all()]
        assert marks == [3, 1], "of the first segment and of its fork"
        await sample.locator(".t.environment").first.click()
        assert "the environment's · not trained" in await text_of(page, "#tip")
        assert not await sample.get_by_text("391 exactly").is_visible()
        for summary in ("session", "turn 0"):
            await sample.locator("summary", has_text=summary).click()
        assert await sample.get_by_text("391 exactly").is_visible()


async def test_on_a_small_screen_nothing_is_cut_off_without_a_hint(tmp_path, redis_server, broker, keys):
    await write_run(broker, keys, write_folder(tmp_path, keys, MODEL))
    await append_numbered(broker, keys.prompts(), [(6, question(6))])
    await append(broker, keys.trajectories(), as_session(completion(6, 0, "")))
    (tmp_path / keys.run_id / "logs").mkdir()
    long_name = "a-log-with-quite-a-long-name-of-a-worker.log"
    (tmp_path / keys.run_id / "logs" / long_name).write_text("word " * 400)
    paths = ("", "/groups", "/groups/0", "/groups/6?shape=chat", "/steps", "/steps/0", "/dead", "/config")
    async with serving(tmp_path, redis_server.url) as base, browsing(width=390, height=800) as page:
        run = f"http://{base}run/{keys.run_id}"
        await settled(page, f"{run}/groups")
        addresses = [run + path for path in (*paths, f"/logs/{long_name}")]
        compared = f"http://{base}compare?run={keys.run_id}&metric=reward"
        for address in (*addresses, f"http://{base}", compared):
            await page.goto(address)
            assert await page.evaluate(CUT_OFF) == [], address
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390, address


async def test_runs_are_compared_and_the_address_keeps_the_choice(tmp_path, redis_server):
    for run in ("one", "two"):
        write_folder(tmp_path, Keys(run))
        steps = [{"kind": "step", "step": s, "time": 1.7e9 + s, "reward": s / 9, "kl": 0.5} for s in range(9)]
        lines = "".join(json.dumps(step) + "\n" for step in steps)
        (tmp_path / run / "metrics.jsonl").write_text(lines)
    async with serving(tmp_path, redis_server.url) as base, browsing() as page:
        await page.goto(f"http://{base}compare?run=two&metric=reward")
        await page.locator(".chart path.line").wait_for(state="attached")
        await page.locator("summary", has_text="Runs").click()
        await page.get_by_label("one").check()
        await page.locator(".chart path.line").nth(1).wait_for(state="attached")
        await page.locator(".series li").nth(1).wait_for()
        assert (await text_of(page, ".series")).split() == ["two", "one"], "who was there keeps his colour"
        await page.get_by_label("Search").fill("k")
        assert await page.locator("#metrics label:visible").all_inner_texts() == ["reward", "kl"]
        await page.get_by_label("kl").check()
        await page.locator("input[name=smooth]").fill("0.5")
        await page.locator(".chart").nth(1).locator("path.raw").nth(1).wait_for(state="attached")
        await page.locator("#tables th", has_text="kl").wait_for()
        address = page.url
        assert address.endswith("/compare?text=k&smooth=0.5&run=two&run=one&metric=reward&metric=kl")
        await page.reload()
        await page.locator(".chart").nth(1).locator("path.raw").nth(1).wait_for(state="attached")
        assert page.url == address
        assert await page.get_by_label("kl").is_checked() and await text_of(page, "#smoothing") == "0.50"


async def test_an_address_leads_back_to_what_was_selected_and_the_browser_keeps_the_token(
    tmp_path, redis_server, broker, keys, monkeypatch
):
    monkeypatch.setenv("TIDEMILL_WEB_TOKEN", "a-token-of-the-browser-test")
    await write_run(broker, keys, write_folder(tmp_path, keys, MODEL), texts=["short"])
    async with (
        serving(tmp_path, redis_server.url) as base,
        browsing(http_credentials={"username": "me", "password": "a-token-of-the-browser-test"}) as page,
    ):
        await settled(page, f"http://{base}run/{keys.run_id}/groups/2")
        await page.locator("#c1 .tokens .t").nth(4).click()
        await page.locator("#colours").get_by_text("advantage", exact=True).click()
        await page.wait_for_url(lambda url: url.endswith("/groups/2?at=4&colour=advantage#c1"))
        address = page.url
        await page.goto("about:blank")
        await page.goto(address)
        await page.locator("#c1 .t.here").wait_for()
        assert "token 4" in await text_of(page, "#tip")
        assert await page.evaluate("document.body.dataset.colour") == "advantage"
