"""The routed experts' weights and computation, as a fused-MoE method of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_dsv4 import ops
from vllm_dsv4.compat import FusedMoEConfig, FusedMoEMethodBase, RoutedExperts, current_platform, set_weight_attrs
from vllm_dsv4.moe.dispatch import combine, dispatch
from vllm_dsv4.parallel import sum_over_ranks

# Rows and columns of a weight that share a scale, by format (model.md 2.1, 2.2).
_SCALE_BLOCK = {"mxfp4": (1, 32), "fp8": (128, 128)}


class Dsv4ExpertsMethod(FusedMoEMethodBase):
    """``format`` is ``"mxfp4"``, ``"fp8"`` or None (unquantised).

    Per rank, with E experts, hidden size D and intermediate size I: ``w13_weight`` [E, 2I, D] (w1's rows, then w3's) and
    ``w2_weight`` [E, D, I], with two columns to the uint8 if MXFP4; ``*_weight_scale`` uint8 (E8M0, one for 32 columns) or
    float32 (one for 128 x 128).
    """

    def __init__(self, moe: FusedMoEConfig, format: str | None):
        super().__init__(moe)
        self.format = format

    @property
    def supports_internal_mk(self) -> bool:
        # Says that ``apply`` gathers tokens over data-parallel ranks itself. vLLM's own gather comes before the routing and
        # leaves the token ids behind, which hash-routed layers need.
        return True

    @property
    def output_is_summed(self) -> bool:
        """Whether ``apply``, or vLLM after it, already sums over tensor-parallel ranks."""
        return self._sum_slices is not None or not self.moe.skip_final_all_reduce

    @property
    def _sum_slices(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        # Ranks that hold slices of the same experts (tensor without expert parallelism) each have a part of every expert's
        # output. The reference sums these before it rounds, so that the split does not show.
        return sum_over_ranks if self.moe.tp_size > 1 and current_platform.is_cpu() else None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        for name, rows, columns in (
            ("w13_weight", 2 * intermediate_size_per_partition, hidden_size),
            ("w2_weight", hidden_size, intermediate_size_per_partition),
        ):
            self._create_weight(layer, name, num_experts, rows, columns, params_dtype, extra_weight_attrs)

    def _create_weight(
        self, layer: nn.Module, name: str, num_experts: int, rows: int, columns: int, params_dtype: torch.dtype, attrs: dict[str, Any]
    ) -> None:
        if self.format is None:
            _register(layer, name, (num_experts, rows, columns), params_dtype, attrs)
            return
        packed = self.format == "mxfp4"
        dtype, scale_dtype = (torch.uint8, torch.uint8) if packed else (torch.float8_e4m3fn, torch.float32)
        block_rows, block_columns = _SCALE_BLOCK[self.format]
        _register(layer, name, (num_experts, rows, columns // 2 if packed else columns), dtype, attrs)
        scale_shape = (num_experts, -(-rows // block_rows), -(-columns // block_columns))
        # "block" tells vLLM's loader to slice scales as it slices weights.
        _register(layer, f"{name}_scale", scale_shape, scale_dtype, {**attrs, "quant_method": "block"})

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts' part of the layer: [num_tokens, hidden_size], wide, this rank's share of the sum over experts."""
        gather = self.moe.dp_size > 1
        if gather:
            x, topk_weights, topk_ids = dispatch(x, topk_weights, topk_ids)
        out = ops.experts(
            x,
            topk_weights,
            topk_ids,
            layer.w13_weight,
            layer.w2_weight,
            w13_sf=getattr(layer, "w13_weight_scale", None),
            w2_sf=getattr(layer, "w2_weight_scale", None),
            swiglu_limit=layer.swiglu_limit or 0.0,
            expert_map=layer.expert_map,
            sum_slices=self._sum_slices,
        )
        out = combine(out) if gather else out
        # vLLM's own all-reduce, which data parallelism brings back, has no float64.
        return out if self.moe.skip_final_all_reduce else out.float()


def _register(layer: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, attrs: dict[str, Any]) -> None:
    # Zeros, not empty: a dummy-weight engine must not compute with NaNs.
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attrs)
