"""The mixture-of-experts block: gate, routed experts and the shared expert (model.md 4)."""

from __future__ import annotations

import torch
from torch import nn

from vllm_dsv4 import ops
from vllm_dsv4.compat import FusedMoEFactory, ReplicatedLinear
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.moe.router import Dsv4Router
from vllm_dsv4.parallel import sum_over_ranks
from vllm_dsv4.quantization.config import Dsv4QuantConfig
from vllm_dsv4.quantization.linear import set_out_dtype
from vllm_dsv4.quantization.merged import MergedLinear


class Gate(ReplicatedLinear):
    """Scores of all experts in float32, with the layer's selection bias or its table of experts by token id."""

    def __init__(self, config: Dsv4Config, hash_routed: bool, prefix: str):
        super().__init__(
            config.hidden_size, config.n_routed_experts, bias=False, quant_config=Dsv4QuantConfig(), prefix=prefix, return_bias=False
        )
        set_out_dtype(self, torch.float32)
        del self.bias
        self.bias: nn.Parameter | None = None
        self.tid2eid: nn.Parameter | None = None
        if hash_routed:
            table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int32)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.zeros(config.n_routed_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The bias only takes part in the selection, so the linear layer's own forward must not see it.
        return self.quant_method.apply(self, x)


class SharedExpert(nn.Module):
    """The expert that every token visits; whole on every rank, as in DeepSeek's code, so that its output is rounded as there."""

    def __init__(self, config: Dsv4Config, quant_config: Dsv4QuantConfig, prefix: str):
        super().__init__()
        hidden_size, size = config.hidden_size, config.n_shared_experts * config.moe_intermediate_size
        self.swiglu_limit = config.swiglu_limit

        def linear(name: str, input_size: int, output_size: int) -> ReplicatedLinear:
            return ReplicatedLinear(
                input_size, output_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.{name}", return_bias=False
            )

        self.w1 = linear("w1", hidden_size, size)
        self.w3 = linear("w3", hidden_size, size)
        self.w2 = linear("w2", size, hidden_size)
        self.merged_up = MergedLinear(self.w1, self.w3)

    def merge_weights(self) -> None:
        """Once the weights are loaded."""
        self.merged_up.merge()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.merged_up(x)
        return self.w2(ops.swiglu(gate, up, self.swiglu_limit, x.dtype))


class MoE(nn.Module):
    """``ffn`` of a layer: [num_tokens, hidden_size] → same. Hash-routed layers also need the tokens' ids."""

    def __init__(self, config: Dsv4Config, layer: int, quant_config: Dsv4QuantConfig, prefix: str):
        super().__init__()
        hash_routed = config.is_hash_layer(layer)
        self.gate = Gate(config, hash_routed, f"{prefix}.gate")
        self.shared_experts = SharedExpert(config, quant_config, f"{prefix}.shared_experts")
        self.experts = FusedMoEFactory(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            router=Dsv4Router(config, self.gate.bias, self.gate.tid2eid),
            swiglu_limit=config.swiglu_limit,
            router_logits_dtype=torch.float32,
            reduce_results=False,
        )

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        routed = self.experts(hidden_states=x, router_logits=self.gate(x), input_ids=input_ids)
        if not self.experts.routed_experts.quant_method.output_is_summed:
            routed = sum_over_ranks(routed)
        # The sum over experts and ranks is wide until here, and rounded once.
        return (routed + self.shared_experts(x)).to(x.dtype)
