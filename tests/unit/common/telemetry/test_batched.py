"""Observations that gather before they are counted: each once, and all before anybody looks."""

import threading

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from tidemill.common.telemetry import batched, metrics
from tidemill.common.telemetry.batched import Batched, Histogram


def test_who_looks_at_the_registry_sees_every_observation_once():
    booked: list[int] = []
    items: Batched[int] = Batched(booked.extend)
    last: Batched[int] = Batched(lambda versions: metrics.COMMITTED_VERSION.set(versions[-1]))
    for number in (1, 2):
        items.add(number)
        last.add(number)
    assert booked == []
    assert REGISTRY.get_sample_value("tidemill_committed_version") == 2, "booked before it is collected"
    generate_latest(REGISTRY)
    assert booked == [1, 2]


def test_no_more_than_a_bounded_number_waits():
    sizes: list[int] = []
    items: Batched[int] = Batched(lambda batch: sizes.append(len(batch)))
    for number in range(batched.MOST + 1):
        items.add(number)
    assert sizes == [batched.MOST]


def test_none_is_lost_or_counted_twice_while_threads_look():
    booked: list[int] = []
    items: Batched[int] = Batched(booked.extend)
    over = threading.Event()

    def look():
        while not over.is_set():
            items.book()

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    for number in range(20_000):
        items.add(number)
    over.set()
    for looker in lookers:
        looker.join()
    items.book()
    assert sorted(booked) == list(range(20_000))


@pytest.mark.parametrize("values", [[0.5], [0.1, 1.0, 1.5, 2.0, 7.0, 1e9], [2.0] * 50])
def test_many_observations_are_the_same_as_one_at_a_time(values):
    def exposition(together):
        registry = CollectorRegistry()
        histogram = Histogram("h", "help", ["lane"], buckets=(1, 2, 5), registry=registry).labels("train")
        if together:
            histogram.observe_many(values)
        else:
            for value in values:
                histogram.observe(value)
        lines = generate_latest(registry).splitlines()
        return b"\n".join(line for line in lines if b"_created" not in line)

    assert exposition(together=True) == exposition(together=False)
