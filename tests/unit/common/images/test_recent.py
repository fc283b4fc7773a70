"""What is kept of pictures, within a number of bytes."""

from tidemill.common.images.recent import Recent


def kept_in(recent: Recent[str]) -> str:
    return "".join(filter(None, (recent.get(digest) for digest in "abcd")))


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    recent = Recent[str](100)
    for digest in "ab":
        recent.keep(digest, digest, 40)
    assert recent.get("a") == "a", "used after the other one"
    recent.keep("c", "c", 20)
    assert kept_in(recent) == "abc", "exactly 100 bytes"
    recent.get("a")
    recent.keep("d", "d", 1)
    assert kept_in(recent) == "acd"


def test_a_value_that_is_kept_again_counts_once() -> None:
    recent = Recent[str](100)
    for num_bytes in (90, 40, 60):
        recent.keep("a", "a", num_bytes)
    recent.keep("b", "b", 40)
    assert kept_in(recent) == "ab"


def test_the_last_value_stays_also_where_it_alone_is_too_large() -> None:
    recent = Recent[str](100)
    recent.keep("a", "a", 10)
    recent.keep("b", "b", 101)
    assert kept_in(recent) == "b"
    recent.keep("c", "c", 10)
    assert kept_in(recent) == "c"
