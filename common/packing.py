"""msgpack for all that leaves a process, and the rule for text that is no valid Unicode.

Half of a surrogate pair (`"\\ud800"`, which JSON can say and UTF-8 cannot) becomes U+FFFD, the mark of a
character that was lost. Whoever sends text sends it through here: an answer of a judge, or the message of an
exception, must not end the process that reports it.
"""

import codecs
import re
from collections.abc import Callable
from typing import Any

import msgpack

_ERRORS = "tidemill-lost-characters"
_LONE = re.compile("[\ud800-\udfff]")
LOST = "\ufffd"


def pack(tree: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """The bytes of plain values; `default` turns others into those."""
    try:
        packed: bytes = msgpack.packb(tree, default=default)
    except UnicodeEncodeError:  # rare: the common case pays nothing for it
        packed = msgpack.packb(tree, default=default, unicode_errors=_ERRORS)
    return packed


def sendable(text: str) -> str:
    """The text with every lone surrogate replaced."""
    return _LONE.sub(LOST, text)


def _replace(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return LOST.encode() * (error.end - error.start), error.end  # UTF-8 takes only ASCII as text here


codecs.register_error(_ERRORS, _replace)
