"""Expert choice: by the gate's scores, or by token id in hash-routed layers."""

from __future__ import annotations

from typing import Any

import torch

from vllm_dsv4 import ops
from vllm_dsv4.compat import BaseRouter, RoutingMethodType
from vllm_dsv4.config import Dsv4Config


class Dsv4Router(BaseRouter):
    """Holds the selection bias [num_experts] or the table [vocab_size, topk] of the layer, one of them None (model.md 4)."""

    def __init__(self, config: Dsv4Config, bias: torch.Tensor | None, tid2eid: torch.Tensor | None):
        super().__init__(top_k=config.num_experts_per_tok, global_num_experts=config.n_routed_experts)
        self.routed_scaling_factor = config.routed_scaling_factor
        self.bias = bias
        self.tid2eid = tid2eid

    @property
    def routing_method_type(self) -> Any:
        return RoutingMethodType.Unspecified

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = ops.router(
            router_logits, self.top_k, self.routed_scaling_factor, bias=self.bias, tid2eid=self.tid2eid, input_ids=input_ids
        )
        return weights, ids if indices_type is None else ids.to(indices_type)
