"""Linear layers: block-FP8, plain, and the head.

A layer's ``out_dtype`` attribute (set by ``set_out_dtype``; default: the input's) asks for a wider result, for example for
partial sums that are still to be reduced over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_dsv4 import ops
from vllm_dsv4.backend import select_backend
from vllm_dsv4.compat import LinearMethodBase, UnquantizedEmbeddingMethod, set_weight_attrs

BLOCK = 128
"""Rows and columns of a weight that share one scale (model.md 2.1)."""


def set_out_dtype(layer: Any, dtype: torch.dtype) -> None:
    layer.out_dtype = dtype


class Dsv4LinearMethod(LinearMethodBase):
    """An unquantised layer: ``weight`` [out, in] in the layer's dtype."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        _register(layer, "weight", shape, params_dtype, extra_weight_attrs)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, layer.weight, out_dtype=getattr(layer, "out_dtype", None))


class Dsv4Fp8LinearMethod(LinearMethodBase):
    """A block-FP8 layer: ``weight`` [out, in] e4m3 with ``scale`` [out/128, in/128] float32 (E8M0 scales are widened exactly)."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if (rows, columns) != (output_size, input_size) and (rows % BLOCK or columns % BLOCK):
            raise ValueError(f"a rank's slice [{rows}, {columns}] of a block-FP8 weight must be whole 128x128 blocks; use fewer ranks")
        _register(layer, "weight", (rows, columns), torch.float8_e4m3fn, extra_weight_attrs)
        _register(layer, "scale", (-(-rows // BLOCK), -(-columns // BLOCK)), torch.float32, extra_weight_attrs)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.fp8_linear(x, layer.weight, layer.scale, out_dtype=getattr(layer, "out_dtype", None))


class Dsv4WidenedLinearMethod(Dsv4Fp8LinearMethod):
    """``wo_a``: stored in block FP8, and widened to the model's dtype, for activations that are not quantised (model.md 5.1).

    Kernels widen the weight as they read it. For the reference it is done once, when the weights are loaded.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        # Scales of a block that belongs to two groups are more than kernels can tell apart.
        if select_backend(layer.weight.device).name != "reference" and layer.o_lora_rank % BLOCK == 0:
            return
        rows, columns = layer.weight.shape
        scale = layer.scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        layer.weight = nn.Parameter((layer.weight.float() * scale).to(layer.params_dtype), requires_grad=False)
        del layer.scale


class Dsv4HeadMethod(UnquantizedEmbeddingMethod):
    """The output head: float32 logits (model.md 3)."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the weight as it is: vLLM's CPU re-packing serves its own GEMM only."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.linear(x, layer.weight, out_dtype=torch.float32)


def _register(layer: nn.Module, name: str, shape: tuple[int, int], dtype: torch.dtype, attrs: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0, **attrs})
