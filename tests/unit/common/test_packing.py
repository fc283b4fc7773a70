"""Text that is no valid Unicode never ends the process that sends it."""

import msgpack

from common.wire import codec
from common.wire.codec import pack, sendable
from common.wire.messages import Score, ScoreStatus

BROKEN = "half \ud800 a pair"


def test_lost_characters_are_marked_and_the_rest_is_kept() -> None:
    tree = {"text": BROKEN, "list": ["\udfff", 1], BROKEN: None}
    marked = "half \ufffd a pair"
    assert msgpack.unpackb(pack(tree)) == {"text": marked, "list": ["\ufffd", 1], marked: None}
    assert sendable(BROKEN) == marked
    assert sendable("\U0001f600 whole") == "\U0001f600 whole"


def test_every_text_of_a_message_can_be_sent() -> None:
    score = Score(
        ticket=1,
        index=0,
        status=ScoreStatus.FAILED,
        error=BROKEN,
        detail={BROKEN: [BROKEN]},
        components={BROKEN: 1.0},
        worker="w",
    )
    again = codec.decode(codec.encode(score), Score)
    assert again.error == "half \ufffd a pair"
    assert again.detail == {"half \ufffd a pair": ["half \ufffd a pair"]}
