"""Host memory of a rank that starts: what it takes at most while it loads its shard, in bytes of that shard.

A random Llama, with experts that transformers packs where `--experts` is given, is written to the disk in
bfloat16. Each rank is a new process on the CPU; when everything is imported and the ranks have met, its peak
is set back, and read again when its float32 shard is filled. With `--whole` also where the model is loaded
whole and then split, which is what happens where it is not clear which weights are which.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import machine, print_result, print_table

SIZES: dict[str, Any] = {"vocab_size": 16_000, "num_attention_heads": 8, "num_key_value_heads": 8}
SIZES |= {"hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 64}
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
MIB = float(1 << 20)


def write_model(folder: Path, experts: int, **changes: int) -> None:
    """A model of random weights, in bfloat16."""
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = SIZES | changes
    if experts:
        sizes["num_local_experts"] = experts
        MixtralForCausalLM(MixtralConfig(**sizes)).bfloat16().save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(folder)


def memory_bytes(field: str) -> int:
    """`VmRSS` or its peak, `VmHWM`, of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def load_shard(rank: int, size: int, port: int, folder: str, way: str, results: Any) -> None:
    """One rank: its shard's bytes, and its peak above what it had before."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from tidemill.services.trainer.policy.fsdp.ranks import join_ranks

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = join_ranks(address | {"RANK": str(rank), "WORLD_SIZE": str(size)})
    ranks.lay_out(None)
    load(f"{folder}/small", ranks, way)  # what is imported and kept for any model counts as before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory_bytes("VmRSS")
    root = load(f"{folder}/model", ranks, way)
    peak = memory_bytes("VmHWM") - before
    results.put((sum(weight.to_local().numel() * 4 for weight in root.parameters()), peak))
    ranks.close()


def load(folder: str, ranks: Any, way: str) -> Any:
    """A model, split, as `load_rank_policy` loads it."""
    import torch
    import transformers

    from tidemill.common.config.run import ModelConfig
    from tidemill.services.trainer.policy.fsdp.rank_policy import ShardedModel
    from tidemill.services.trainer.policy.model_loading import open_model
    from tidemill.services.trainer.weights.pretrained import give_storage
    from tidemill.services.trainer.weights.store import model_tensors

    transformers.utils.logging.disable_progress_bar()
    config = ModelConfig(path=folder, max_model_len=16)
    model, weights = open_model(config, ranks.device, reads_later=way == "shards")
    root = ShardedModel(model, ranks, torch.float32)
    if weights is not None:
        give_storage(root, ranks.device)
        weights.fill(model_tensors(model))
    return root


def measure(folder: str, size: int, way: str) -> tuple[int, int]:
    """Shard and peak of the rank whose peak is the highest."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = [(rank, size, port, folder, way, results) for rank in range(size)]
    processes = [context.Process(target=load_shard, args=own) for own in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return max(found, key=lambda pair: pair[1])


def main() -> None:
    """Measure, print the table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_memory")
    parser.add_argument("--layers", type=int, default=24, help="24 are 370 MiB in float32 (%(default)s)")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0 is a dense model")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks (%(default)s)")
    parser.add_argument("--whole", action="store_true", help="also load the model whole, and then split it")
    options = parser.parse_args()
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", options.experts, num_hidden_layers=options.layers)
        write_model(Path(folder) / "small", options.experts, **SMALL)
        for size in map(int, options.ranks.split(",")):
            for way in ("whole", "shards") if options.whole else ("shards",):
                shard, peak = measure(folder, size, way)
                ratios[f"{way}_{size}"] = round(peak / shard, 2)
                rows.append(
                    (f"{size}, {way}", f"{shard / MIB:.0f}", f"{peak / MIB:.0f}", f"{peak / shard:.2f}")
                )
    columns = ("ranks", "shard, MiB", "peak, MiB", "peak / shard")
    print_table("Host memory of a rank while it loads", columns, rows, machine())
    print_result({"benchmark": "start_memory", "peak_of_shard": ratios, "experts": options.experts})


if __name__ == "__main__":
    main()
