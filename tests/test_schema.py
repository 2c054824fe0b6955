"""The checkpoint schema against the tables of model.md 2, and the checker's messages."""

from __future__ import annotations

import re

import pytest
import torch

from vllm_dsv4.checkpoint.schema import (
    CheckpointChecker,
    CheckpointError,
    TensorSpec,
    check_checkpoint,
    checkpoint_schema,
    draft_schema,
    is_draft_tensor,
)
from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.config import Dsv4Config

F8, E8M0, F32, BF16, I8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.bfloat16, torch.int8

# The table of model.md 2 for Flash: shape, and the dtype on disk.
FLASH_SPOTS = {
    "embed.weight": ([129280, 4096], BF16),
    "head.weight": ([129280, 4096], BF16),
    "norm.weight": ([4096], BF16),
    "hc_head_fn": ([4, 16384], F32),
    "hc_head_base": ([4], F32),
    "hc_head_scale": ([1], F32),
    "layers.0.attn_norm.weight": ([4096], BF16),
    "layers.42.ffn_norm.weight": ([4096], BF16),
    "layers.7.hc_attn_fn": ([24, 16384], F32),
    "layers.7.hc_ffn_base": ([24], F32),
    "layers.7.hc_ffn_scale": ([3], F32),
    "layers.1.attn.attn_sink": ([64], F32),
    "layers.1.attn.wq_a.weight": ([1024, 4096], F8),
    "layers.1.attn.wq_a.scale": ([8, 32], E8M0),
    "layers.1.attn.q_norm.weight": ([1024], BF16),
    "layers.1.attn.wq_b.weight": ([32768, 1024], F8),
    "layers.1.attn.wq_b.scale": ([256, 8], E8M0),
    "layers.1.attn.wkv.weight": ([512, 4096], F8),
    "layers.1.attn.wkv.scale": ([4, 32], E8M0),
    "layers.1.attn.kv_norm.weight": ([512], BF16),
    "layers.1.attn.wo_a.weight": ([8192, 4096], F8),
    "layers.1.attn.wo_a.scale": ([64, 32], E8M0),
    "layers.1.attn.wo_b.weight": ([4096, 8192], F8),
    "layers.1.attn.wo_b.scale": ([32, 64], E8M0),
    "layers.2.attn.compressor.wkv.weight": ([1024, 4096], BF16),
    "layers.2.attn.compressor.wgate.weight": ([1024, 4096], BF16),
    "layers.2.attn.compressor.ape": ([4, 1024], F32),
    "layers.2.attn.compressor.norm.weight": ([512], BF16),
    "layers.3.attn.compressor.wkv.weight": ([512, 4096], BF16),
    "layers.3.attn.compressor.wgate.weight": ([512, 4096], BF16),
    "layers.3.attn.compressor.ape": ([128, 512], F32),
    "layers.3.attn.compressor.norm.weight": ([512], BF16),
    "layers.42.attn.indexer.wq_b.weight": ([8192, 1024], F8),
    "layers.42.attn.indexer.wq_b.scale": ([64, 8], E8M0),
    "layers.42.attn.indexer.weights_proj.weight": ([64, 4096], BF16),
    "layers.42.attn.indexer.compressor.wkv.weight": ([256, 4096], BF16),
    "layers.42.attn.indexer.compressor.wgate.weight": ([256, 4096], BF16),
    "layers.42.attn.indexer.compressor.ape": ([4, 256], F32),
    "layers.42.attn.indexer.compressor.norm.weight": ([128], BF16),
    "layers.3.ffn.gate.weight": ([256, 4096], BF16),
    "layers.3.ffn.gate.bias": ([256], F32),
    "layers.2.ffn.gate.tid2eid": ([129280, 6], torch.int64),
    "layers.3.ffn.experts.0.w1.weight": ([2048, 2048], I8),
    "layers.3.ffn.experts.255.w3.weight": ([2048, 2048], I8),
    "layers.3.ffn.experts.255.w3.scale": ([2048, 128], E8M0),
    "layers.3.ffn.experts.255.w2.weight": ([4096, 1024], I8),
    "layers.3.ffn.experts.255.w2.scale": ([4096, 64], E8M0),
    "layers.3.ffn.shared_experts.w1.weight": ([2048, 4096], F8),
    "layers.3.ffn.shared_experts.w3.scale": ([16, 32], E8M0),
    "layers.3.ffn.shared_experts.w2.weight": ([4096, 2048], F8),
    "layers.3.ffn.shared_experts.w2.scale": ([32, 16], E8M0),
}
# Shapes that follow from V4-Pro's configuration (model.md 1.2): D 7168, H 128, q_lora 1536, 16 groups, I 3072, 384 experts.
PRO_SPOTS = {
    "hc_head_fn": [4, 28672],
    "layers.0.hc_attn_fn": [24, 28672],
    "layers.0.attn.wq_a.weight": [1536, 7168],
    "layers.0.attn.wq_b.weight": [65536, 1536],
    "layers.0.attn.wq_b.scale": [512, 12],
    "layers.0.attn.wo_a.weight": [16384, 4096],
    "layers.0.attn.wo_b.weight": [7168, 16384],
    "layers.0.attn.wo_b.scale": [56, 128],
    "layers.0.attn.compressor.ape": [128, 512],
    "layers.60.attn.indexer.wq_b.weight": [8192, 1536],
    "layers.60.attn.compressor.wkv.weight": [1024, 7168],
    "layers.60.ffn.experts.383.w1.weight": [3072, 3584],
    "layers.60.ffn.experts.383.w1.scale": [3072, 224],
    "layers.60.ffn.experts.383.w2.weight": [7168, 1536],
    "layers.60.ffn.gate.bias": [384],
}


def _schema(preset: str, **options: object) -> dict[str, TensorSpec]:
    return checkpoint_schema(Dsv4Config.from_hf(preset_config(preset, **options)))


@pytest.fixture(scope="module")
def flash() -> dict[str, TensorSpec]:
    return _schema("flash")


def test_flash_shapes_and_dtypes(flash: dict[str, TensorSpec]) -> None:
    for name, (shape, dtype) in FLASH_SPOTS.items():
        assert list(flash[name].shape) == shape, name
        assert dtype in flash[name].dtypes, name


def test_flash_spots_cover_every_family(flash: dict[str, TensorSpec]) -> None:
    """So that no kind of tensor escapes the comparison with the table."""

    def family(name: str) -> str:
        name = re.sub(r"hc_(attn|ffn)", "hc", re.sub(r"(attn|ffn)_norm", "norm", re.sub(r"\.\d+\.", ".N.", name)))
        return re.sub(r"w[13](?=\.(weight|scale))", "w1", name)

    families = {family(name) for name in flash}
    assert families == {family(name) for name in FLASH_SPOTS}


def test_flash_families_per_layer(flash: dict[str, TensorSpec]) -> None:
    """Model.md 2: 35 in layers 0-1, 46 in every ratio-4 layer, 39 in every ratio-128 layer."""
    for layer in range(43):
        names = {re.sub(r"experts\.\d+", "experts.E", name) for name in flash if name.startswith(f"layers.{layer}.")}
        assert len(names) == (35 if layer < 2 else 46 if layer % 2 == 0 else 39), layer
    assert sum(not name.startswith("layers.") for name in flash) == 6


def test_flash_expert_count_and_routing_tensors(flash: dict[str, TensorSpec]) -> None:
    assert sum(".experts." in name for name in flash) == 43 * 256 * 6
    assert {name.split(".")[1] for name in flash if name.endswith("tid2eid")} == {"0", "1", "2"}
    assert {int(name.split(".")[1]) for name in flash if name.endswith("gate.bias")} == set(range(3, 43))


def test_pro_shapes() -> None:
    schema = _schema("pro")
    for name, shape in PRO_SPOTS.items():
        assert list(schema[name].shape) == shape, name
    assert not any("indexer" in name for name in schema if name.startswith(("layers.0.", "layers.1.")))


def test_draft_tensors() -> None:
    """Model.md 2: a ratio-0 layer with a gate bias and its own experts, and the draft's own projections, norms and head."""
    schema = draft_schema(Dsv4Config.from_hf(preset_config("flash")))
    assert all(is_draft_tensor(name) for name in schema)
    assert {name.removeprefix("mtp.0.") for name in schema if ".attn." not in name and ".ffn." not in name} == {
        *(f"{part}_norm.weight" for part in ("attn", "ffn")),
        *(f"hc_{part}_{kind}" for part in ("attn", "ffn", "head") for kind in ("fn", "base", "scale")),
        *(f"{name}.weight" for name in ("enorm", "hnorm", "norm", "e_proj", "h_proj")),
        "e_proj.scale",
        "h_proj.scale",
    }
    assert schema["mtp.0.e_proj.weight"] == TensorSpec((4096, 4096), "fp8_weight")
    assert schema["mtp.0.h_proj.scale"].shape == (32, 32)
    assert "mtp.0.ffn.gate.bias" in schema and not any("compressor" in name or "tid2eid" in name for name in schema)
    assert not is_draft_tensor("layers.0.attn_norm.weight")


def test_fp8_experts_and_float32_scales() -> None:
    """Flash-Base (model.md 1.1): experts in block FP8; scales of linear layers and experts in float32 or E8M0."""
    schema = _schema("flash", expert_dtype="fp8")
    assert schema["layers.0.ffn.experts.9.w1.weight"].shape == (2048, 4096)
    assert schema["layers.0.ffn.experts.9.w1.weight"].dtypes == {F8}
    assert schema["layers.0.ffn.experts.9.w1.scale"].shape == (16, 32)
    for name in ("layers.0.ffn.experts.9.w2.scale", "layers.0.attn.wq_a.scale"):
        assert schema[name].dtypes == {F32, E8M0}


def test_mxfp4_scales_must_be_e8m0(flash: dict[str, TensorSpec]) -> None:
    assert flash["layers.0.ffn.experts.0.w1.scale"].dtypes == {E8M0}
    assert flash["layers.0.attn.wq_a.scale"].dtypes == {F32, E8M0}


def test_unquantised_has_the_same_weights_and_no_scales(flash: dict[str, TensorSpec]) -> None:
    schema = _schema("flash", quantized=False)
    assert set(schema) == {name for name in flash if not name.endswith(".scale")}
    for name, spec in schema.items():
        expected = {torch.int64, torch.int32} if name.endswith("tid2eid") else {BF16, F32, torch.float16}
        assert spec.dtypes == expected, name
    assert schema["layers.3.ffn.experts.0.w1.weight"].shape == (2048, 4096)


def _tensors(schema: dict[str, TensorSpec]) -> dict[str, tuple[list[int], torch.dtype]]:
    return {name: (list(spec.shape), min(spec.dtypes, key=str)) for name, spec in schema.items()}


@pytest.fixture
def config() -> Dsv4Config:
    return Dsv4Config.from_hf(preset_config("tiny"))


def _check(config: Dsv4Config, tensors: dict[str, tuple[list[int], torch.dtype | str]]) -> str:
    with pytest.raises(CheckpointError) as error:
        check_checkpoint(config, [(name, shape, dtype) for name, (shape, dtype) in tensors.items()])
    return str(error.value)


def test_complete_checkpoint_passes(config: Dsv4Config) -> None:
    tensors = _tensors(checkpoint_schema(config))
    check_checkpoint(config, [(name, shape, dtype) for name, (shape, dtype) in tensors.items()])
    draft = [(name, [1], "I8") for name in ("mtp.0.norm.weight", "mtp.2.markov_head.weight")]
    check_checkpoint(config, [*draft, *((name, shape, dtype) for name, (shape, dtype) in tensors.items())])


def test_safetensors_dtype_names_are_understood(config: Dsv4Config) -> None:
    checker = CheckpointChecker(config)
    assert checker.check("layers.0.attn.wq_a.weight", [128, 256], "F8_E4M3")
    assert checker.check("layers.0.attn.wq_a.scale", [1, 2], "F8_E8M0")
    assert checker.check("layers.0.ffn.experts.0.w1.weight", [256, 128], "I8")
    assert not checker.check("layers.0.attn.wkv.scale", [4, 2], "F4")


def test_every_fault_is_named_at_once(config: Dsv4Config) -> None:
    tensors: dict[str, tuple[list[int], torch.dtype | str]] = dict(_tensors(checkpoint_schema(config)))
    del tensors["layers.3.ffn.gate.bias"], tensors["norm.weight"]
    tensors["layers.0.ffn.gate.bias"] = ([8], F32)  # a hash layer has none
    tensors["layers.4.attn.indexer.wq_b.weight"] = ([2048, 64], F8)
    tensors["layers.1.attn.wq_a.weight"] = ([128, 256], BF16)
    message = _check(config, tensors)
    assert "missing (2):\n    layers.3.ffn.gate.bias\n    norm.weight" in message
    assert "unexpected (1):\n    layers.0.ffn.gate.bias" in message
    assert "wrong shape (1):\n    layers.4.attn.indexer.wq_b.weight is [2048, 64], expected [2048, 128]" in message
    assert "wrong dtype (1):\n    layers.1.attn.wq_a.weight is BF16, expected F8_E4M3" in message


def test_tensor_of_wrong_shape_and_dtype_is_named_for_both(config: Dsv4Config) -> None:
    tensors: dict[str, tuple[list[int], torch.dtype | str]] = dict(_tensors(checkpoint_schema(config)))
    tensors["layers.0.attn.wq_a.scale"] = ([2, 1], torch.uint8)
    message = _check(config, tensors)
    assert "layers.0.attn.wq_a.scale is U8, expected F32 or F8_E8M0" in message
    assert "layers.0.attn.wq_a.scale is [2, 1], expected [1, 2]" in message


def test_faulty_tensors_are_not_to_be_loaded(config: Dsv4Config) -> None:
    checker = CheckpointChecker(config)
    assert checker.check("norm.weight", [256], BF16)
    assert not checker.check("norm.weight", [256], BF16), "repeated"
    assert not checker.check("head.weight", [256, 1024], BF16), "shape"
    assert not checker.check("embed.weight", [1024, 256], F8), "dtype"
    assert not checker.check("layers.9.attn_norm.weight", [256], BF16), "unexpected"
    assert not checker.check("mtp.0.norm.weight", [256], BF16), "draft"
    with pytest.raises(CheckpointError, match=r"repeated \(1\):\n    norm\.weight"):
        checker.finish()


def test_long_lists_are_cut_but_counted(config: Dsv4Config) -> None:
    message = _check(config, {"norm.weight": ([256], BF16)})
    count = len(checkpoint_schema(config)) - 1
    assert f"missing ({count}):" in message and f"... and {count - 20} more" in message
    assert len(message.splitlines()) < 30


def test_hints(config: Dsv4Config) -> None:
    tensors = _tensors(checkpoint_schema(config))
    assert "save_pretrained" in _check(config, {f"model.{name}": value for name, value in tensors.items()})
    fp8 = _tensors(checkpoint_schema(Dsv4Config.from_hf(preset_config("tiny", expert_dtype="fp8"))))
    assert "expert_dtype" in _check(config, fp8)
    assert "download complete" in _check(config, {name: value for name, value in tensors.items() if name != "norm.weight"})
