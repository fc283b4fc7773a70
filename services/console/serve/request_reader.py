"""The process that reads large requests: it parses and validates them, and makes their trajectories.

Frames in: `{begin, part}` are parts of a body, from its byte `begin` on; `{id}` asks to read that body;
`{id, first_ticket, begin}` asks for its next samples, from the one with the number `begin` on. Out:
`{id, num_samples, num_groups}` or `{id, error}`; and `{id, samples: [...]}` with at least one, each as
`[lane, ticket, index, schema, payload]`.
"""

from typing import Any

from pydantic import ValidationError

from tidemill.common.process.children import become_child, read_frame, sender
from tidemill.common.process.json_api import explained
from tidemill.services.console.serve.samples import Batch, ScoringRequest

MAX_SAMPLES = 256
PART_BYTES = 1 << 20
"""A part of a request ends with the sample that reaches one of these."""


def main(descriptor: int, parent: int) -> None:
    """Answer frames until process `parent` closes the socket `descriptor`."""
    with become_child(descriptor, parent) as channel:
        send = sender(channel)
        frames = channel.makefile("rb")
        if read_frame(frames) is None:
            return
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
                batch, answer = _begun(body)
                body.clear()
            send({"id": asked["id"], **answer})


def _begun(body: bytearray) -> tuple[Batch, dict[str, Any]]:
    try:
        batch = Batch(ScoringRequest.model_validate_json(body).samples)
    except ValidationError as error:
        return Batch([]), {"error": explained(error)}
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
