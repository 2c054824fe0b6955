"""``wo_a``: the first half of the output projection, one small matrix for each group of heads (model.md 3.4)."""

from __future__ import annotations

import torch

from vllm_dsv4 import ops
from vllm_dsv4.compat import ColumnParallelLinear
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.quantization.config import Dsv4QuantConfig


class GroupedOutputProjection(ColumnParallelLinear):
    """[T, heads, head_dim] → [T, groups, o_lora_rank], with this rank's heads and groups."""

    def __init__(self, config: Dsv4Config, quant_config: Dsv4QuantConfig, prefix: str):
        self.group_dim = config.heads_per_group * config.head_dim
        self.o_lora_rank = config.o_lora_rank
        super().__init__(
            self.group_dim, config.o_groups * config.o_lora_rank, bias=False, quant_config=quant_config, prefix=prefix, return_bias=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(x.shape[0], -1, self.group_dim)
        weight = self.weight.view(-1, self.o_lora_rank, self.group_dim)
        scale = getattr(self, "scale", None)
        return ops.grouped_linear(x, weight, None if scale is None else scale.view(weight.shape[0], -1, scale.shape[1]))
