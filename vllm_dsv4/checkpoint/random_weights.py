"""Random weights for any configuration, stored as the real checkpoint stores them.

Every tensor that a default initialisation would zero (sinks, position biases, routing tables, ...) is random too, so that
a model with these weights depends on all of them (model.md 8.2). Each tensor has its own random stream, seeded by the
checkpoint's seed and the tensor's name: it does not depend on the order of generation or on the other tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from vllm_dsv4.checkpoint.schema import (
    FLOAT32,
    FP8_BLOCK,
    FP8_SCALE,
    FP8_WEIGHT,
    INDEX,
    MXFP4_SCALE,
    MXFP4_WEIGHT,
    TensorSpec,
    checkpoint_schema,
    draft_schema,
)
from vllm_dsv4.config import Dsv4Config
from vllm_dsv4.reference.numerics import E4M3_MAX, exponent_to_e8m0, fp8_scale_exponent, quantize_e4m3, quantize_mxfp4


def random_tensors(
    config: Dsv4Config, seed: int = 0, dtype: torch.dtype = torch.bfloat16, include_draft: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint as (native name, tensor as stored), one at a time.

    Args:
        config: decides names, shapes and storage. MXFP4 experts go with UE8M0 scales everywhere (as Flash), FP8 experts with
            float32 scales that are not powers of two (as Flash-Base, model.md 1.1).
        seed: of all tensors.
        dtype: of the tensors that are neither quantised nor always float32.
        include_draft: whether the ``mtp.*`` tensors are added.
    """
    schema = checkpoint_schema(config) | (draft_schema(config) if include_draft else {})
    use_e8m0 = config.quantization is not None and config.quantization.experts == "mxfp4"
    for name, spec in schema.items():
        if spec.storage in (FP8_SCALE, MXFP4_SCALE):
            continue  # comes with its weight
        if spec.storage == INDEX:
            yield name, _random_expert_table(name, spec.shape, config.n_routed_experts, seed)
            continue
        value = random_values(name, spec, seed)
        if spec.storage == FP8_WEIGHT:
            weight, scale = quantize_block_fp8(value, use_e8m0)
        elif spec.storage == MXFP4_WEIGHT:
            packed, scale_bytes = quantize_mxfp4(value)
            weight, scale = packed.view(torch.int8), scale_bytes.view(torch.float8_e8m0fnu)
        else:
            yield name, value if spec.storage == FLOAT32 else value.to(dtype)
            continue
        yield name, weight
        yield name.removesuffix("weight") + "scale", scale


def random_values(name: str, spec: TensorSpec, seed: int) -> torch.Tensor:
    """The values of one floating-point tensor before any rounding, float32, in its logical shape."""
    shape = spec.shape if spec.storage != MXFP4_WEIGHT else (spec.shape[0], 2 * spec.shape[1])
    normal = torch.randn(shape, generator=_generator(name, seed))
    if name.endswith(("norm.weight", "_scale")):
        return 1 + 0.1 * normal
    if name.endswith(("attn_sink", "embed.weight")):
        # With unit embeddings the token weighs as much in the streams as a sublayer's output does.
        return normal
    if name.endswith(".ape"):
        return 0.5 * normal
    if name.endswith("_base"):
        return 0.3 * normal
    if name.endswith("gate.bias"):
        return 0.1 * normal
    assert len(shape) == 2, name
    return normal * shape[1] ** -0.5


def quantize_block_fp8(weight: torch.Tensor, use_e8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one scale for each 128x128 block (model.md 2.1).

    Args:
        weight: [N, K] float32.
        use_e8m0: round each scale up to a power of two and store it as E8M0; otherwise amax / 448 in float32.

    Returns:
        ``(weight [N, K] float8_e4m3fn, scale [ceil(N/128), ceil(K/128)] float8_e8m0fnu or float32)``.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [N/128, 128, K/128, 128]
    amax = blocks.abs().amax((1, 3))
    exponent = fp8_scale_exponent(amax)
    scale = torch.exp2(exponent.float()) if use_e8m0 else (amax / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    quantized = quantize_e4m3(blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return quantized, exponent_to_e8m0(exponent).view(torch.float8_e8m0fnu) if use_e8m0 else scale


def _random_expert_table(name: str, shape: tuple[int, ...], num_experts: int, seed: int) -> torch.Tensor:
    """[vocab, topk] int64: distinct experts in each row."""
    keys = torch.rand((shape[0], num_experts), generator=_generator(name, seed))
    return keys.topk(shape[1], dim=1).indices


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
