"""The process that reads large requests: it parses and validates them, and makes their trajectories.

Frames in: `{begin, part}` are parts of a body, from its byte `begin` on; `{id}` asks to read that body;
`{id, first_ticket, begin}` asks for its next samples, from the one with the number `begin` on. Out:
`{id, num_samples, num_groups}` or `{id, error}`; and `{id, samples: [...]}` with at least one, each as
`[lane, ticket, index, schema, payload]`. Pictures are stored before the answer that says how many samples
there are; `{id, away}` says that the store does not take them now.

The first frame has `images`, the config's section or null, and `run_dir` and `url`, where pictures are.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import StoreError
from tidemill.common.files import StorageError
from tidemill.common.images.door import ImageDoor
from tidemill.common.images.store import ImageStore
from tidemill.common.process.children import become_child, read_frame, sender
from tidemill.common.process.json_api import InputError, explained
from tidemill.services.console.serve.samples import (
    Batch,
    ScoringRequest,
    has_pictures,
    store_pictures,
)

MAX_SAMPLES = 256
NO_SECTION = (
    "samples have pictures, and the config of this service has no section `images`: add `images: {}` to it, "
    "and a reward that takes them"
)
PART_BYTES = 1 << 20
"""A part of a request ends with the sample that reaches one of these."""


def main(descriptor: int, parent: int) -> None:
    """Answer frames until process `parent` closes the socket `descriptor`."""
    with become_child(descriptor, parent) as channel:
        send = sender(channel)
        frames = channel.makefile("rb")
        setup = read_frame(frames)
        if setup is None:
            return
        pictures = PictureIntake.of(setup)
        send({})
        batch = Batch([])
        body = bytearray()
        while (asked := read_frame(frames)) is not None:
            if "part" in asked:
                if asked["begin"] == 0:  # also where the one before was given up in the middle
                    # Before this one is parsed: the older request may be as large.
                    batch = Batch([])
                    body.clear()
                body += asked["part"]
                continue
            if "first_ticket" in asked:
                answer = _samples(batch, asked)
            else:
                batch, answer = _begun(body, pictures)
                body.clear()
            send({"id": asked["id"], **answer})


class PictureIntake:
    """Stores the pictures of requests."""

    def __init__(self, config: ImagesConfig, store: ImageStore) -> None:
        self._config = config
        self._store = store

    @classmethod
    def of(cls, setup: dict[str, Any]) -> "PictureIntake | None":
        if setup["images"] is None:
            return None
        config = ImagesConfig.model_validate(setup["images"])
        return cls(config, ImageStore(Path(setup["run_dir"]), setup["url"]))

    def batch_of(self, request: ScoringRequest) -> Batch:
        """Raises: as `store_pictures`."""
        # A new door for each request: it notes each picture, and a service gets others for ever.
        door = ImageDoor(self._config, self._store)
        return Batch(request.samples, store_pictures(request, door, self._config))


def _begun(body: bytearray, pictures: PictureIntake | None) -> tuple[Batch, dict[str, Any]]:
    try:
        request = ScoringRequest.model_validate_json(body)
        if not has_pictures(request):
            batch = Batch(request.samples)
        elif pictures is None:
            raise InputError(NO_SECTION)
        else:
            batch = pictures.batch_of(request)
    except ValidationError as error:
        return Batch([]), {"error": explained(error)}
    except InputError as error:
        return Batch([]), {"error": str(error)}
    except (StorageError, StoreError) as error:
        return Batch([]), {"away": str(error)}
    return batch, {"num_samples": len(batch.samples), "num_groups": batch.num_groups}


def _samples(batch: Batch, asked: dict[str, Any]) -> dict[str, Any]:
    samples: list[list[Any]] = []
    num_bytes = 0
    for position in range(asked["begin"], len(batch.samples)):
        each = batch.encoded(asked["first_ticket"], position)
        samples.append([each.lane.value, *each.key, each.schema, each.payload])
        num_bytes += len(each.payload)
        if len(samples) >= MAX_SAMPLES or num_bytes >= PART_BYTES:
            break
    return {"samples": samples}
