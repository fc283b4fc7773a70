"""Keeps vLLM's parameters in the layout of the checkpoint, so that an update reaches what is computed with.

`keep_parameters` runs before the model loads. On a CPU vLLM computes from private copies, packed for its
kernels: linear layers free their parameter, experts replace it. Here linear layers compute from the parameter
itself, and experts keep it beside the packed copy, which `refresh` makes again after an update.
"""

from typing import Any

from tidemill.services.rollout.engines.vllm_launch import is_cpu


def keep_parameters() -> None:
    """Replace the functions that pack, tie or free parameters; call it before a model is loaded."""
    from vllm.model_executor.model_loader import utils as loader_utils

    # An untied head that equals the embeddings at the start would share their memory from then on, and get
    # their updates.
    loader_utils.maybe_retie_word_embeddings = lambda *_: None
    if not is_cpu():
        return
    import torch
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def dispatch(layer: Any, remove_weight: bool) -> None:
        # `remove_weight` does nothing here: updates are written into the weight that it would free.
        layer.cpu_linear = torch.nn.functional.linear

    # Both callers import the name when they run, so replacing the module's attribute reaches them.
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch
    pack, compute = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def pack_beside(experts: Any, layer: Any) -> None:
        experts.tidemill_repack = lambda: _pack_beside(experts, layer, pack)
        experts.tidemill_repack()

    def compute_packed(experts: Any, **named: Any) -> None:
        compute(experts, **named | experts.tidemill_packed)

    CPUUnquantizedExperts.process_weights_after_loading = pack_beside
    CPUUnquantizedExperts.apply = compute_packed


def _pack_beside(experts: Any, layer: Any, pack: Any) -> None:
    """Let vLLM pack a module that has copies of the layer's experts."""
    from torch.nn import Module, Parameter

    copies = Module()
    for name, parameter in layer.named_parameters(recurse=False):
        copy = Parameter(parameter.detach().clone(), requires_grad=False)
        copies.register_parameter(name, copy)
    for name in ("moe_config", "activation"):
        setattr(copies, name, getattr(layer, name, None))
    pack(experts, copies)
    bias = getattr(layer, "w13_bias", None)
    if bias is not None and copies.w13_bias.shape != bias.shape:
        raise ValueError("experts with a bias whose size vLLM pads on this CPU cannot be updated")
    experts.tidemill_packed = {"w1": copies.w13_weight.data, "w2": copies.w2_weight.data}


def refresh(model: Any, dtype: Any) -> None:
    """Make everything again that was derived from parameters: packed experts, absorbed matrices of MLA."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        repack = getattr(getattr(kernel, "fused_experts", None), "tidemill_repack", None)
        if repack is not None:
            repack()
        if hasattr(layer, "W_UV") or hasattr(layer, "W_UK_T"):
            layer.process_weights_after_loading(dtype)  # in place: captured graphs keep their addresses
