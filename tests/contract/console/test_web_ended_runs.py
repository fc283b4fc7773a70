"""`tidemill web` on runs whose Redis is gone: what it left, what the folder tells, and nothing at all."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.archives import archive
from tests.support.waiting import wait_until
from tests.support.web_runs import write_folder, write_run
from tidemill.common.history import StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire.keys import Keys
from tidemill.services.console.web import runs
from tidemill.services.console.web.curves import MAX_POINTS
from tidemill.services.console.web.runs import Catalog
from tidemill.services.console.web.server import Access, create_app

KEYS = Keys("ended")


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    catalog = Catalog(tmp_path)
    transport = httpx.ASGITransport(create_app(catalog, Access.of("127.0.0.1")))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1/run/ended", timeout=60, follow_redirects=True
    ) as client:
        yield client
    await catalog.close()


async def shows(site: httpx.AsyncClient, path: str, words: str) -> None:
    async def is_there() -> bool:
        return words in (await site.get(path)).text

    await wait_until(is_there, 60, f"{words!r} on {path}")


async def leave_a_run(tmp_path: Path, *, archived: bool = False) -> EmbeddedRedis:
    """A run whose own Redis was stopped."""
    config = write_folder(tmp_path, KEYS)
    redis = EmbeddedRedis(tmp_path / "ended" / "redis")
    redis.start()
    broker = await Broker.connect(redis.url)
    await write_run(broker, KEYS, config)
    if archived:
        for stream in StreamName:
            await archive(broker, KEYS, tmp_path / "ended", stream)
    await broker.close()
    redis.stop()
    return redis


async def test_what_a_redis_left_is_shown_and_let_go_of_when_nobody_looks(
    site: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "REFRESH_STILL_S", 0.05)
    redis = await leave_a_run(tmp_path)
    await shows(site, "/groups/0", "words of the judge")
    await shows(site, "/groups", "6 groups")
    await shows(site, "", "stopped")
    monkeypatch.setattr(runs, "UNWATCHED_S", 0.0)

    def is_free() -> bool:
        try:
            redis.start()
        except Exception:
            return False
        redis.stop()
        return True

    await wait_until(lambda: asyncio.to_thread(is_free), what="the run could be resumed")
    monkeypatch.setattr(runs, "UNWATCHED_S", 90.0)
    await shows(site, "/groups/1", "words of the judge")


async def test_a_run_of_which_only_the_archive_is_left_is_all_there(
    site: httpx.AsyncClient, tmp_path: Path
) -> None:
    await leave_a_run(tmp_path, archived=True)
    shutil.rmtree(tmp_path / "ended" / "redis")
    await shows(site, "", "the archive in")
    await shows(site, "/groups/0", "words of the judge")
    await shows(site, "/groups/1", "Dead letter")
    await shows(site, "/eval-groups/0", "an answer of the evaluation")
    await shows(site, "/steps/1", "2 groups, in the order")


async def test_a_run_whose_config_is_not_understood_says_so_and_is_shown_once_it_is(
    site: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RETRY_S", 0.05)
    write_folder(tmp_path, KEYS)
    config = tmp_path / "ended" / "config.yaml"
    good = config.read_text()
    config.write_text("trainer: {steps: -1, <b>: 2}")
    await shows(site, "", "This run cannot be read now")
    assert "<b>" not in (await site.get("/groups")).text.partition("<main")[0]
    (tmp_path / "ended" / "metrics.jsonl").write_text('{"kind": "step", "step": 0, "reward": 0.125}\n')
    config.write_text(good)
    await shows(site, "/steps", "0.125")


async def compares_it_with_another(site: httpx.AsyncClient, runs: Path) -> None:
    other = yaml.safe_load((runs / "ended" / "config.yaml").read_text()) | {"seed": 77}
    (runs / "other").mkdir()
    (runs / "other" / "config.yaml").write_text(yaml.safe_dump(other))
    lines = [{"kind": "step", "step": s, "time": 1.7e9 + s, "reward": -s} for s in range(2000)]
    (runs / "other" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    address = "http://127.0.0.1/compare{}?run=ended&run=other&metric=reward"
    (chart,) = (await site.get(address.format(".json") + "&smooth=0.5")).json()["charts"]
    ended, other_line = chart["lines"]
    assert ended["raw"][-1] == [3, 0.75] and len(other_line["points"]) <= MAX_POINTS
    assert other_line["raw"][-1] == [1999, -1999]
    page = (await site.get(address.format(""))).text
    assert "1 field<" in page and "seed" in page and "77" in page and "−1\u202f999" in page
    rows = (await site.get(address.format(".csv"))).text.splitlines()
    assert rows[:2] == ["run,metric,step,seconds,value", "ended,reward,0,0.0,0.0"] and len(rows) == 2005


async def shows_its_logs_and_nothing_else(site: httpx.AsyncClient, folder: Path) -> None:
    logs = folder / "logs"
    logs.mkdir()
    (logs / "trainer.log").write_text("".join(f"line {n} <b>\n" for n in range(20_000)))
    (logs / "secret.log").symlink_to("/etc/hostname")
    (logs / '"><img src=x>\n.log').write_text("not a name of ours")
    newest = (await site.get("/logs/trainer.log")).text
    assert (
        "line 19999 &lt;b&gt;" in newest
        and "line 1 " not in newest
        and "secret" not in newest
        and "img" not in newest.partition("<main")[2]
    )
    earlier = newest.partition("?end=")[2].partition('"')[0]
    page = (await site.get(f"/logs/trainer.log?end={earlier}&text=LINE+1")).text
    assert "earlier</a>" in page and "line 19999" not in page and "line 1" in page
    assert (await site.get("/logs/trainer.log?file=1")).text.endswith("line 19999 <b>\n")
    for name in ("secret.log", "..%2fconfig.yaml", "..%2f..%2fetc%2fpasswd", ".hidden"):
        assert (await site.get(f"/logs/{name}")).status_code == 404, name


async def test_a_run_of_which_only_the_folder_is_left_has_its_curves(
    site: httpx.AsyncClient, tmp_path: Path
) -> None:
    write_folder(tmp_path, KEYS)
    lines = [{"kind": "step", "step": s, "time": 1.7e9 + s, "reward": s / 4, "loss": None} for s in range(4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "ended" / "metrics.jsonl").write_text(text)
    await shows(site, "/steps/3", "0.75")
    await shows(site, "", "nothing is left of the streams")
    charts = (await site.get("/charts.json")).json()["charts"]
    assert charts[0]["lines"][0]["points"][-1] == [3, 0.75]
    assert "no groups here yet" in (await site.get("/groups")).text
    assert (await site.get("/metrics.csv")).text.splitlines()[4].startswith("3,")
    assert len((await site.get("/metrics.json")).json()["steps"]) == 4
    assert "trainer.optimizer.lr" in (await site.get("/config?text=optimizer")).text
    assert yaml.safe_load((await site.get("/config.yaml")).text)["run_id"] == "ended"
    await compares_it_with_another(site, tmp_path)
    await shows_its_logs_and_nothing_else(site, tmp_path / "ended")
    assert (await site.get("/dead")).status_code == 503
