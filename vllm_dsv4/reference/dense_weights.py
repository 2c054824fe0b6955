"""A checkpoint's weights for the dense model, and the layers that are nothing but a weight."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from vllm_dsv4.checkpoint.reader import weight_files
from vllm_dsv4.checkpoint.schema import (
    FLOAT32,
    FP8_SCALE,
    INDEX,
    MXFP4_SCALE,
    MXFP4_WEIGHT,
    PLAIN,
    CheckpointChecker,
    checkpoint_schema,
)
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.reference.numerics import dequantize_block_fp8, dequantize_mxfp4, e8m0_to_float, fp8_round_trip
from vllm_dsv4.reference.rms_norm import rms_norm_ref


class DenseWeights:
    """Tensors by native name. Quantised weights stay as they are stored and are widened where they are used.

    ``dtype`` is that of plain weights and of all values between layers; inside layers values are float64.
    """

    def __init__(self, config: Dsv4Config, tensors: dict[str, torch.Tensor], dtype: torch.dtype):
        self.config = config
        self.dtype = dtype
        self._tensors = tensors

    @classmethod
    def read(cls, folder: str | Path, config: Dsv4Config, dtype: torch.dtype) -> DenseWeights:
        """Read the backbone's tensors from a checkpoint's safetensors files.

        Raises:
            CheckpointError: tensors are missing, unexpected, misshapen or of the wrong dtype.
        """
        schema, checker = checkpoint_schema(config), CheckpointChecker(config)
        tensors = {}
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensor = file.get_tensor(name)
                    if checker.check(name, tensor.shape, tensor.dtype):
                        tensors[name] = _unpack(tensor, schema[name].storage, dtype)
        checker.finish()
        return cls(config, tensors, dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm with weight ``name``: x [T, n] → same, rounded once."""
        return rms_norm_ref(x, self[f"{name}.weight"], self.config.rms_norm_eps)

    def linear(self, name: str, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """``x · weightᵀ``: x [T, K] → [T, N], rounded once. Before a quantised weight x is quantised too (model.md 5.1)."""
        wide = fp8_round_trip(x) if f"{name}.scale" in self._tensors else x.double()
        return (wide @ self.widened(name, torch.float64).T).to(out_dtype or self.dtype)

    def widened(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Weight ``name`` [N, K] in ``dtype``, however it is stored (model.md 2.1, 2.2)."""
        weight, scale = self[f"{name}.weight"], self._tensors.get(f"{name}.scale")
        if scale is None:
            return weight.to(dtype)
        return dequantize_mxfp4(weight, scale, dtype) if weight.dtype == torch.uint8 else dequantize_block_fp8(weight, scale, dtype)


def _unpack(tensor: torch.Tensor, storage: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as stored → plain values in ``dtype``, float32 scales, MXFP4 weights and their scales as bytes."""
    if storage == PLAIN:
        return tensor.to(dtype)
    if storage == FLOAT32:
        return tensor.float()
    if storage == INDEX:
        return tensor.long()
    if storage == FP8_SCALE:
        return e8m0_to_float(tensor.view(torch.uint8)) if tensor.dtype == torch.float8_e8m0fnu else tensor
    return tensor.view(torch.uint8) if storage in (MXFP4_WEIGHT, MXFP4_SCALE) else tensor
