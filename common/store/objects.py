"""Objects in an object store, such as a bucket of S3; its keys and endpoint come from AWS_... variables.

An object exists as a whole or not at all. The client repeats requests after temporary errors (no connection,
answers of 500 and more), with growing pauses; an error that is raised was final, or lasted longer than that.
"""

import contextlib
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tidemill.common.errors import ConfigError, RefusedError, StoreError, TidemillError, UnreadableError

OBJECT_SCHEMES = ("s3", "gs", "az", "memory")
REFUSED = re.compile(r"status code: (400|401|403)\b")
"""Answers for keys that are missing, wrong or too weak. Looked for in the text: where the client lists, its
error has no class of its own."""
ABOUT_KEYS = re.compile(
    "expired|invalid.?token|TokenRefreshRequired|invalid_grant|InvalidAccessKeyId|SignatureDoesNotMatch",
    re.IGNORECASE,
)
"""What a store says of keys that are wrong or have expired. Of its answers 400 only those are refusals: it
gives others to requests that it cannot read."""
BAD_REQUEST = "400"
FORBIDDEN = "403"
MAX_OTHERS = 4
"""Objects that were read lately, which are asked for where another one is refused."""


class Objects:
    """The objects below one address. Threads may share it."""

    def __init__(
        self, url: str, field: str, error: type[TidemillError] = StoreError, retries: Any = None
    ) -> None:
        """`field` is the config's field with the address, for messages; failures are raised as `error`.

        Raises:
            ConfigError: the address is not that of a store, or the library is not installed.
        """
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(
                f"{field} is {url}: object stores need `pip install 'tidemill[objects]'`"
            ) from None
        try:
            self._store: Any = from_url(url, **({"retry_config": retries} if retries else {}))
        except Exception as problem:  # the library's own errors share no root
            raise ConfigError(
                f"{field} is {url}, which cannot be opened: {problem}. Expected an address such as "
                "s3://bucket/folder, and its variables in the environment (AWS_..., GOOGLE_..., AZURE_...)"
            ) from None
        self._obstore: Any = obstore
        self._error = error
        self._url = url
        self._field = field
        self._lately_read: deque[str] = deque(maxlen=MAX_OTHERS)
        """Objects that it has given: while it still gives one of them, the keys are right and may read."""

    def read(self, path: str, start: int, length: int) -> bytes:
        get_range = self._obstore.get_range
        data = self._read(path, lambda: get_range(self._store, path, start=start, length=length))
        if len(data) != length:
            raise self._error(f"the object {path} ends before byte {start + length:,}.")
        return bytes(data)

    def read_all(self, path: str) -> bytes:
        return bytes(self._read(path, lambda: self._obstore.get(self._store, path).bytes()))

    def write(self, path: str, data: Path | bytes) -> None:
        """Upload a file, in parts where it is large, or bytes; on return they are durable."""
        self._do(path, lambda: self._obstore.put(self._store, path, data))

    def names(self, folder: str = "") -> list[str]:
        """Paths of all objects below a folder."""
        prefix = f"{folder}/" if folder else None
        pages = self._do(folder, lambda: list(self._obstore.list(self._store, prefix)))
        return [item["path"] for page in pages for item in page]

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, in this order."""
        for path in paths:
            self._do(path, lambda path=path: self._obstore.delete(self._store, path))

    def remove(self, folder: str) -> None:
        """Delete everything below a folder, its manifest first."""
        self.delete(sorted(self.names(folder), key=lambda path: not path.endswith(".json")))

    def close(self) -> None:
        """Does nothing: no connection is held open."""

    def _read(self, path: str, work: Any) -> Any:
        data = self._do(path, work, is_read=True)
        if path not in self._lately_read:
            self._lately_read.append(path)
        return data

    def _gives_others(self, path: str) -> bool:
        """Whether it still gives another object."""
        for path_of_other in set(self._lately_read) - {path}:
            # Removed since, or the rights were: neither says that they are there.
            with contextlib.suppress(Exception):
                self._obstore.head(self._store, path_of_other)
                return True
        return False

    def _do(self, path: str, work: Any, is_read: bool = False) -> Any:
        try:
            return work()
        except Exception as problem:  # the library's own errors share no root
            text = str(problem)
            reason = (text.splitlines() or [type(problem).__name__])[0][:300]
            refusal = REFUSED.search(text)
            status = refusal[1] if refusal is not None else ""
            is_about_keys = ABOUT_KEYS.search(text) is not None
            if not status or (status == BAD_REQUEST and not is_about_keys):
                raise self._error(f"object store: {path}: {reason}") from problem
            may_be_missing = status == FORBIDDEN and is_read and not is_about_keys
            if may_be_missing and self._gives_others(path):
                kind = UnreadableError if self._error is StoreError else self._error
                raise kind(
                    f"object store: {path}: it does not give this object (status {status}), and gives "
                    "others. A store answers so for an object that is missing, where the keys lack the right "
                    f"to list (s3:ListBucket). It says: {reason}"
                ) from problem
            kind = RefusedError if self._error is StoreError else self._error
            raise kind(
                f"object store: {path}: it refuses this process's keys (status {status}). Check the "
                "variables AWS_... (GOOGLE_..., AZURE_...) of this process, and what they may do at "
                f"{self._url} ({self._field}): read, write, delete and list (s3:ListBucket, without which a "
                f"missing object looks so, too). It says: {reason}"
            ) from problem
