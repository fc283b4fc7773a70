"""The address that others are told: of this machine as they see it."""

import socket

import pytest

from tidemill.common.process.heartbeats import ADVERTISE_VARIABLE, Heartbeat, reachable_host
from tidemill.common.redis.client import URL_VARIABLE


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv(ADVERTISE_VARIABLE, raising=False)
    monkeypatch.setenv(URL_VARIABLE, "redis://:secret@127.0.0.1:6379/0")


def test_who_listens_on_one_address_is_reached_there():
    assert reachable_host("127.0.0.1") == "127.0.0.1"
    assert reachable_host("10.1.2.3") == "10.1.2.3"


def test_what_the_user_says_comes_first(monkeypatch):
    monkeypatch.setenv(ADVERTISE_VARIABLE, "node-7")
    assert reachable_host("0.0.0.0") == reachable_host("127.0.0.1") == "node-7"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@127.0.0.1:6379/0",
        "rediss://user:se%40cret@127.0.0.1/0",
        "redis+sentinel://127.0.0.1:26379,127.0.0.2:26379/mine",
        "unix:///run/redis.sock",
    ],
)
def test_who_listens_everywhere_is_reached_on_the_way_to_redis(monkeypatch, url):
    monkeypatch.setenv(URL_VARIABLE, url)
    assert reachable_host("0.0.0.0") == "127.0.0.1"


def test_without_a_route_to_redis_it_is_the_name_of_the_host(monkeypatch):
    monkeypatch.setenv(URL_VARIABLE, "redis://no-such-host.invalid:6379")
    assert reachable_host("0.0.0.0") == socket.gethostname()


def test_a_target_is_host_and_port():
    assert Heartbeat("a", "rollout", address="10.0.0.7", port=90).metrics_target == "10.0.0.7:90"
    assert Heartbeat("a", "rollout", address="fd00::7", port=90).metrics_target == "[fd00::7]:90"
    assert Heartbeat("a", "rollout", port=90).metrics_target == ""
    assert Heartbeat("a", "rollout", address="10.0.0.7").metrics_target == ""
