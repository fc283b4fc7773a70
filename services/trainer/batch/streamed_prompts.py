"""Prompts whose rows stay on disk (`data.stream`)."""

from collections.abc import Sequence
from functools import lru_cache

from tidemill.common.data.dataset import Row
from tidemill.services.trainer.batch.prompts import Encode, Prompt, content_of

STREAMED_KEPT = 256
"""Most streamed prompts that are kept in memory after they were read."""


class StreamedPrompts:
    """Prompts that are read and tokenised when they are needed. All are read once at the start, to check them
    and for the digest; only the row of each is kept, 8 bytes. Raises ConfigError: as `encode_rows`."""

    def __init__(self, rows: Sequence[Row], encode: Encode) -> None:
        self._encode = encode
        self._source = rows
        self._read = lru_cache(maxsize=STREAMED_KEPT)(self._read_prompt)
        self.rows, self.content = content_of(self._encode(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        return self._read(int(self.rows[index]))

    def _read_prompt(self, row: int) -> Prompt:
        (prompt,) = self._encode([self._source[row]])
        return prompt
