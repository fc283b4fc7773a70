"""What adapters know their base by: every bit of every parameter counts, and nothing else does."""

import torch
import xxhash

from tidemill.services.trainer.weights import store
from tidemill.services.trainer.weights.store import digest_parameters


def test_the_digest_is_xxh3_of_the_bytes_in_name_order(monkeypatch):
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(3, 4),
        "a": torch.randn(5),
        "c": torch.randn(2, 2, dtype=torch.bfloat16),
        "d": torch.tensor(1.0),
        "e": torch.zeros(0),
    }
    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        hasher.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    expected = hasher.hexdigest()
    assert digest_parameters(tensors.items()) == expected
    assert digest_parameters(reversed(list(tensors.items()))) == expected
    monkeypatch.setattr(store, "PIECE_BYTES", 7)
    assert digest_parameters(tensors.items()) == expected
    tensors["b"] = tensors["b"].t().contiguous().t()
    assert digest_parameters(tensors.items()) == expected, "whatever its layout in memory"
    tensors["a"].view(torch.int32)[3] ^= 1
    assert digest_parameters(tensors.items()) != expected
