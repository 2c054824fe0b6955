"""The quantisation method that vLLM picks for DeepSeek-V4 checkpoints, whether quantised or not."""

from __future__ import annotations

from typing import Any

import torch

from vllm_dsv4.compat import LinearBase, ParallelLMHead, QuantizationConfig, QuantizeMethodBase, RoutedExperts
from vllm_dsv4.config import ConfigError, QuantizationFormat

_METHODS = ("fp8", "deepseek_v4_fp8")
"""What the checkpoints' ``quant_method`` says, and what vLLM's own support of the model renames it to."""


class Dsv4QuantConfig(QuantizationConfig):
    """Gives every layer of the model its weights and its op.

    ``format`` is None for layers that are stored unquantised: all of an unquantised checkpoint, and the gate, compressor and
    head of a quantised one.
    """

    NAME = "dsv4"

    def __init__(self, format: QuantizationFormat | None = None):
        super().__init__()
        self.format = format

    @classmethod
    def get_name(cls) -> str:
        return cls.NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Dsv4QuantConfig:
        # The experts' format stands outside of this dict (expert_dtype), so the model builds its own instances.
        return cls()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None, **_: Any) -> str | None:
        """Claim DeepSeek-V4's ``fp8`` checkpoints, and any model for which the user (or a draft's target) named this method.

        Raises:
            ConfigError: another method is asked for one of these checkpoints; vLLM would pass over it without a word.
        """
        if user_quant == cls.NAME:
            return cls.NAME
        is_dsv4 = getattr(hf_config, "model_type", None) == "deepseek_v4"
        method = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, dict) else None
        if not is_dsv4 or method not in _METHODS:
            return None
        if user_quant is not None and user_quant not in _METHODS:
            raise ConfigError(
                f"quantization = {user_quant!r} does not fit this DeepSeek-V4 checkpoint, which is {method!r}; serve without --quantization"
            )
        return cls.NAME

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm_dsv4.moe.method import Dsv4ExpertsMethod
        from vllm_dsv4.quantization.grouped_output import GroupedOutputProjection
        from vllm_dsv4.quantization.linear import (
            Dsv4Fp8LinearMethod,
            Dsv4HeadMethod,
            Dsv4LinearMethod,
            Dsv4WidenedLinearMethod,
        )

        if isinstance(layer, RoutedExperts):
            return Dsv4ExpertsMethod(layer.moe_config, None if self.format is None else self.format.experts)
        if isinstance(layer, ParallelLMHead):
            return Dsv4HeadMethod()
        if not isinstance(layer, LinearBase):
            return None
        if self.format is None:
            return Dsv4LinearMethod()
        return Dsv4WidenedLinearMethod() if isinstance(layer, GroupedOutputProjection) else Dsv4Fp8LinearMethod()
