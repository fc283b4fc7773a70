"""Weights on another machine: behind the trainer's weight server, or in an object store.

Both hold `weights/v00000012/{files, manifest.json}` of a run below one address and give parts of files; the
reader checks these. The trainer uploads to object stores, the manifest last: where it is, the files are.
"""

import os
from typing import Any
from urllib.parse import urlsplit

from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.store.objects import OBJECT_SCHEMES, Objects

TOKEN_VARIABLE = "TIDEMILL_WEIGHTS_TOKEN"  # the variable's name, not a token
"""Variable with the secret that the weight server and its clients share."""
TIMEOUT_S = 30.0
"""Limit on each read of an answer; a whole download has none."""
WEB_SCHEMES = ("http", "https")
_PRUNED = "the version was pruned already and a newer one is on its way, or the server has other runs."
ADVICE = {401: f"{TOKEN_VARIABLE} is not the one of the server.", 404: _PRUNED, 416: _PRUNED}


class WeightServer:
    """Client of a run's weight server. Threads may share it."""

    def __init__(self, url: str, token: str, run_id: str) -> None:
        import httpx

        self._base = f"{url.rstrip('/')}/runs/{run_id}"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(timeout=TIMEOUT_S, headers=headers)

    def read(self, path: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start` on of a file such as `weights/v00000012/model.safetensors`.
        Raises WeightsError: they cannot be read now."""
        answer = self._get(path, {"Range": f"bytes={start}-{start + length - 1}"})
        # "bytes 0-9/1234" where the server gave a part; else it gave all of the file.
        file_bytes = answer.headers.get("content-range", "").rpartition("/")[2]
        total = int(file_bytes or len(answer.content))
        if len(answer.content) != length:
            raise WeightsError(f"{answer.url} has {total:,} bytes, and not {length:,} from {start:,} on.")
        return bytes(answer.content)

    def read_all(self, path: str) -> bytes:
        return bytes(self._get(path, {}).content)

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str, headers: dict[str, str]) -> Any:
        import httpx

        url = f"{self._base}/{path}"
        try:
            answer = self._http.get(url, headers=headers)
        except httpx.HTTPError as error:
            raise WeightsError(
                f"cannot download {url}: {str(error) or type(error).__name__}. Is the address right "
                "(TIDEMILL_WEIGHTS_URL, else weights.url), and does the head serve weights?"
            ) from error
        if answer.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise WeightsError(
                f"{url} answered {answer.status_code}; {ADVICE.get(answer.status_code, 'expected 200.')}"
            )
        return answer


class ObjectStore(Objects):
    """Versions of one run in a bucket; see `Objects`."""

    def __init__(self, url: str, run_id: str) -> None:
        super().__init__(f"{url.rstrip('/')}/{run_id}", "weights.url", WeightsError)


Remote = WeightServer | ObjectStore


def open_remote(url: str, run_id: str) -> Remote | None:
    """The remote at `url` (`weights.address`); None where that is empty.

    Raises:
        ConfigError: the address is of no known kind.
    """
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme in WEB_SCHEMES and parts.netloc:
        return WeightServer(url, os.environ.get(TOKEN_VARIABLE, ""), run_id)
    if parts.scheme in OBJECT_SCHEMES:
        return ObjectStore(url, run_id)
    raise ConfigError(
        f"the address of weights is {url!r}; expected one such as http://head:8200 or s3://bucket/folder."
    )
