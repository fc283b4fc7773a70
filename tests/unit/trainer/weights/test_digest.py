"""The digest: every bit of every parameter counts, and nothing else does."""

import torch
import xxhash

from tidemill.services.trainer.weights import store
from tidemill.services.trainer.weights.store import digest_parameters


def parameters() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"b": torch.randn(3, 4), "a": torch.randn(5), "c": torch.randn(2, 2, dtype=torch.bfloat16)}


def test_the_digest_is_xxh3_of_the_bytes_in_name_order():
    tensors = parameters()
    expected = xxhash.xxh3_128()
    for name in ("a", "b", "c"):
        expected.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    assert digest_parameters(tensors.items()) == expected.hexdigest()
    assert len(expected.hexdigest()) == 32


def test_the_order_given_does_not_matter():
    tensors = parameters()
    assert digest_parameters(tensors.items()) == digest_parameters(reversed(list(tensors.items())))


def test_one_bit_changes_it():
    tensors = parameters()
    before = digest_parameters(tensors.items())
    tensors["b"].view(torch.int32)[1, 2] ^= 1
    assert digest_parameters(tensors.items()) != before


def test_memory_layout_does_not_matter():
    tensor = torch.randn(4, 6)
    transposed = tensor.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert digest_parameters([("a", transposed)]) == digest_parameters([("a", tensor)])


def test_pieces_give_the_digest_of_the_whole(monkeypatch):
    tensors = parameters()
    whole = digest_parameters(tensors.items())
    monkeypatch.setattr(store, "PIECE_BYTES", 7)
    assert digest_parameters(tensors.items()) == whole


def test_scalars_and_empty_tensors_are_fine():
    assert digest_parameters([("a", torch.tensor(1.0)), ("b", torch.zeros(0))])
