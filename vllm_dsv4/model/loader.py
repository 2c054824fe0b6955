"""Loading of a native checkpoint into the model's parameters.

Names match but for the routed experts, which vLLM stacks. Bytes are reinterpreted, never converted: FP8 weights and MXFP4
bytes are copied as they are, E8M0 scales keep their bytes beside MXFP4 weights and are widened exactly to float32 elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vllm_dsv4.checkpoint.schema import CheckpointChecker, CheckpointError
from vllm_dsv4.compat import fused_moe_make_expert_params_mapping
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.reference.numerics import e8m0_to_float

_EXPERT = re.compile(r"(?P<ffn>layers\.\d+\.ffn)\.(?P<expert>experts\.\d+\.w[123]\.)(?P<kind>weight|scale)")


def load_weights(model: nn.Module, config: Dsv4Config, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy this rank's part of every tensor into its parameter; returns the names of the parameters that were loaded.

    Raises:
        CheckpointError: a tensor is missing, unexpected, misshapen or of the wrong dtype; all such are named. Or a table of
            experts names one that does not exist.
    """
    checker = CheckpointChecker(config)
    parameters = dict(model.named_parameters())
    experts = _expert_parameters(model, config)
    loaded: set[str] = set()
    for name, tensor in weights:
        if not checker.check(name, tensor.shape, tensor.dtype):
            continue
        if name.endswith(".tid2eid"):
            _check_experts(name, tensor, config.n_routed_experts)
        match = _EXPERT.fullmatch(name)
        loaded.add(_load_expert(parameters, experts, match, tensor) if match else _load(parameters, name, tensor))
    checker.finish()
    return loaded


def _check_experts(name: str, table: torch.Tensor, num_experts: int) -> None:
    low, high = (int(value) for value in table.aminmax())
    if low < 0 or high >= num_experts:
        raise CheckpointError(f"{name} names experts from {low} to {high}, the model has 0 to {num_experts - 1}; is the file intact?")


def _expert_parameters(model: nn.Module, config: Dsv4Config) -> dict[str, tuple[str, int, str]]:
    """Checkpoint name of an expert's projection to its stacked parameter, the expert's index and the projection's name."""
    mapping = fused_moe_make_expert_params_mapping(
        model, ckpt_gate_proj_name="w1", ckpt_down_proj_name="w2", ckpt_up_proj_name="w3", num_experts=config.n_routed_experts
    )
    return {name: (parameter, expert, shard) for parameter, name, expert, shard in mapping}


def _load(parameters: dict[str, nn.Parameter], name: str, tensor: torch.Tensor) -> str:
    parameter = parameters[name]
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = e8m0_to_float(tensor.view(torch.uint8))
    loader = getattr(parameter, "weight_loader", None)
    if loader is None:
        parameter.data.copy_(tensor)
    else:
        loader(parameter, tensor)
    return name


def _load_expert(parameters: dict[str, Any], experts: dict[str, tuple[str, int, str]], match: re.Match[str], tensor: torch.Tensor) -> str:
    stacked, expert, shard = experts[match["expert"]]
    # "weight_scale" in the name is how vLLM's loader tells scales from weights.
    name = f"{match['ffn']}.{stacked}{'weight' if match['kind'] == 'weight' else 'weight_scale'}"
    parameter = parameters[name]
    if parameter.dtype == torch.uint8:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype == torch.float8_e8m0fnu:
        tensor = e8m0_to_float(tensor.view(torch.uint8))
    # False for an expert of another rank, which is no fault.
    parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert, return_success=True)
    return name
