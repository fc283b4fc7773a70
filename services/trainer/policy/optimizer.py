"""AdamW on float32 master weights: parameter groups, learning rate, clipping, and state without pickle.

Guarantees: the learning rate is a function of the number of updates alone, so a restart needs no scheduler
state but that number; a gradient that is not finite never reaches a weight or a moment; `optimizer_tensors`
and `load_optimizer` are inverse to each other, bit by bit.
"""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import get_total_norm

from tidemill.common.config.trainer import OptimizerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.shards import local
from tidemill.services.trainer.policy.state import ShardReader, fill

NamedParameters = Sequence[tuple[str, nn.Parameter]]

_NO_MATRIX = re.compile(
    r"bias|(^|[._])(layer|rms)?norm\d*\.|(^|\.)ln_?\w*\.|(^|\.)(A_log|D|time_\w+|sinks)$", re.I
)
"""Ends of names (`owner.parameter`) of biases, norms, and rates of decay of recurrent layers. With a row for
each expert, head or channel they have two dimensions and multiply no input all the same."""


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments in its state."""


class AdamW(optim.AdamW):
    """torch's AdamW, whose moments are beside the weights."""

    moves_moments = True
    """Whether moments leave the device and come back with the weights."""

    def make_room(self, parameter: Tensor) -> Tensor:
        """A tensor where the moments of this parameter are kept; its numbers are read into it."""
        return torch.empty_like(parameter.detach())


def build_optimizer(
    parameters: NamedParameters,
    config: OptimizerConfig,
    own_rates: Mapping[str, float] | None = None,
    kind: type[AdamW] | None = None,
) -> AdamW:
    """AdamW (arXiv 1711.05101) with weight decay on matrices only: not on biases and norms.

    `own_rates` are peak learning rates of parameters by name, where they differ from `config.lr`; each
    group's `lr_share` says what part of the schedule's rate its parameters take. `kind` may hold the moments
    elsewhere.
    """
    rates = own_rates or {}
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups = []
    for rate in sorted({config.lr, *rates.values()}):
        chosen = [(name, parameter) for name, parameter in trained if rates.get(name, config.lr) == rate]
        share = {"lr": rate, "lr_share": rate / config.lr}
        for mesh in _meshes([p for _, p in chosen]):
            of_mesh = [(name, p) for name, p in chosen if _mesh(p) == mesh]
            matrices = [p for name, p in of_mesh if is_matrix(name, p)]
            others = [p for name, p in of_mesh if not is_matrix(name, p)]
            groups.append({"params": matrices, "weight_decay": config.weight_decay, **share})
            groups.append({"params": others, "weight_decay": 0.0, **share})
    groups = [group for group in groups if group["params"]]
    # Fused: one pass over memory for each parameter, on CPUs and GPUs.
    make_optimizer = kind or AdamW
    return make_optimizer(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _meshes(tensors: Sequence[Tensor]) -> list[DeviceMesh | None]:
    """Meshes that tensors are split over, each once; torch computes with tensors of one mesh at a time."""
    return list(dict.fromkeys(map(_mesh, tensors)))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter multiplies what passes through it (linear layers, experts, embeddings,
    convolutions): those decay."""
    return parameter.ndim >= 2 and not _NO_MATRIX.search(".".join(name.split(".")[-2:]))


def learning_rate(config: OptimizerConfig, update: int, num_steps: int, updates_per_step: int = 1) -> float:
    """The rate of update number `update` (from 0) of a run; it moves with every update.

    With W updates in the warm-up steps, warm-up is lr * (n + 1) / (W + 1), never 0, so that no update is
    wasted. Then `constant`, or with x = (n - W) / (num_updates - W): `linear` lr * (1 - x), `cosine` lr * (1
    + cos(pi x)) / 2. Past the end x stays 1.
    """
    warmup = config.warmup_steps * updates_per_step
    num_updates = num_steps * updates_per_step
    if update < warmup:
        return config.lr * (update + 1) / (warmup + 1)
    progress = min(1.0, (update - warmup) / max(1, num_updates - warmup))
    if config.schedule == "linear":
        return config.lr * (1.0 - progress)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr


def finish_gradients(parameters: NamedParameters, denominator: float, max_norm: float) -> float:
    """Divide accumulated gradients by the denominator and scale them down to `max_norm`; return the norm
    before scaling down.

    Division and clipping are one multiplication. A norm that is not finite is returned as it is, and the
    gradients are left alone: the caller must discard them.
    """
    gradients = [parameter.grad for _, parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norm = _total_norm(gradients) / denominator
    if math.isfinite(norm):
        scale = min(1.0, max_norm / norm) / denominator if norm > 0.0 else 1.0 / denominator
        for gradient in gradients:
            gradient.mul_(scale)
    return norm


def _total_norm(gradients: Sequence[Tensor]) -> float:
    """The norm of all gradients; a call of all ranks where they are sharded."""
    usual, *others = sorted(_meshes(gradients), key=lambda mesh: mesh.ndim if mesh else 0)
    total = get_total_norm([gradient for gradient in gradients if _mesh(gradient) == usual])
    norms = [float(total.full_tensor() if isinstance(total, DTensor) else total)]
    for mesh in others:
        # In one sum over a copy's ranks, which are those of the usual mesh: torch would go axis by axis.
        norm_of_mesh = get_total_norm([local(gradient) for gradient in gradients if _mesh(gradient) == mesh])
        assert usual is not None, "all parameters are split, or none"
        copies = [Replicate()] * (usual.ndim - 1)
        sums = DTensor.from_local(norm_of_mesh.square(), usual, [*copies, Partial()], run_check=False)
        norms.append(math.sqrt(float(sums.full_tensor())))
    return math.hypot(*norms)


def optimizer_tensors(optimizer: AdamW, parameters: NamedParameters) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter>.<moment>` tensors (views: save before the next update)."""
    return {
        f"{name}.{moment}": value
        for name, parameter in parameters
        for moment, value in optimizer.state.get(parameter, {}).items()
    }


OPTIMIZER = "optimizer."
"""Prefix of the names of its tensors in a checkpoint."""


@torch.no_grad()
def load_optimizer(optimizer: AdamW, parameters: NamedParameters, source: ShardReader) -> None:
    """Replace the optimizer's state by the result of `optimizer_tensors`: each tensor is read into its place,
    so that none is in memory twice. Raises ConfigError: a tensor belongs to no parameter, or has another
    shape; nothing is changed."""
    by_name = dict(parameters)
    shapes = source.shapes
    owners = {}
    for key in (key for key in shapes if key.startswith(OPTIMIZER)):
        name, _, moment = key.removeprefix(OPTIMIZER).rpartition(".")
        if name not in by_name or (moment != "step" and shapes[key] != tuple(by_name[name].shape)):
            raise ConfigError(
                f"the checkpoint's optimizer state {key} of shape {shapes[key]} does not fit the model; "
                "resume with the model the run was started with"
            )
        owners[key] = by_name[name], moment
    optimizer.state.clear()
    for key, (parameter, moment) in owners.items():
        if moment == "step":
            # It stays float32: AdamW's fused kernel wants it beside the parameter.
            value = source.read(key).to(device=parameter.device, dtype=torch.float32, copy=True)
        else:
            value = fill(optimizer.make_room(parameter), source, key)
        optimizer.state[parameter][moment] = value
