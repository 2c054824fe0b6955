"""``vllm-dsv4 doctor``: its sums against numbers worked out by hand and against vLLM's own cache planner."""

from __future__ import annotations

import argparse
import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dsv4 import backend
from vllm_dsv4.checkpoint.tiny import preset_config
from vllm_dsv4.checkpoint.writer import write_checkpoint
from vllm_dsv4.cli import environment
from vllm_dsv4.cli.doctor import parse_size
from vllm_dsv4.cli.environment import Device, VllmStatus
from vllm_dsv4.cli.fit import Layout, cache_kinds, cache_pool, weight_bytes
from vllm_dsv4.cli.main import main
from vllm_dsv4.config import ConfigError, Dsv4Config

GIB = 1 << 30


def _config(preset: str, **options: Any) -> Dsv4Config:
    return Dsv4Config.from_hf(preset_config(preset, **options))


# Flash, from the table of model.md 2.
EXPERT = 3 * 2048 * 2048 + (2 * 2048 * 128 + 4096 * 64)  # w1, w2, w3 at two values a byte, and their scales
ROUTED = 43 * 256 * EXPERT


def _fp8(rows: int, columns: int) -> int:
    return rows * columns + (rows // 128) * (columns // 128) * 4  # scales widened to float32


# wq_b, wo_a (widened to bfloat16, no scale left), wo_b, sinks, shared expert; embedding and head.
WIDENED = 43 * (2 * 8192 * 4096 - _fp8(8192, 4096))
SHARDED = (
    43 * (_fp8(32768, 1024) + 2 * 8192 * 4096 + _fp8(4096, 8192) + 64 * 4 + 2 * _fp8(2048, 4096) + _fp8(4096, 2048)) + 2 * 2 * 129280 * 4096
)
NORMS = 2 * (4096 + 4096 + 1024 + 512)
HYPER = 2 * 4 * (24 * 16384 + 24 + 3)
REPLICATED = (
    43 * (_fp8(1024, 4096) + _fp8(512, 4096) + NORMS + HYPER + 2 * 256 * 4096)
    + 40 * 4 * 256  # gate biases
    + 3 * 4 * 129280 * 6  # routing tables, int32
    + 21 * (2 * 2 * 1024 * 4096 + 4 * 4 * 1024 + 2 * 512)  # ratio-4 compressors
    + 21 * (_fp8(8192, 1024) + 2 * 64 * 4096 + 2 * 2 * 256 * 4096 + 4 * 4 * 256 + 2 * 128)  # indexers
    + 20 * (2 * 2 * 512 * 4096 + 4 * 128 * 512 + 2 * 512)  # ratio-128 compressors
    + 2 * 4096
    + 4 * (4 * 16384 + 4 + 1)
)


@pytest.mark.parametrize(
    ("layout", "routed", "sharded"),
    [
        (Layout(), ROUTED, SHARDED),
        (Layout(tensor_parallel=2), ROUTED // 2, SHARDED // 2),
        (Layout(tensor_parallel=8), ROUTED // 8, SHARDED // 8),
        (Layout(tensor_parallel=8, expert_parallel=True), ROUTED // 8, SHARDED // 8),
        (Layout(data_parallel=3, expert_parallel=True), 43 * 86 * EXPERT, SHARDED),  # 256 experts on 3 GPUs: 86 on the fullest
        (Layout(tensor_parallel=2, data_parallel=4, expert_parallel=True), ROUTED // 8, SHARDED // 2),
    ],
)
def test_flash_weight_bytes(layout: Layout, routed: int, sharded: int) -> None:
    weights = weight_bytes(_config("flash"), layout, max_model_len=1048576)
    assert (weights.routed_experts, weights.sharded, weights.replicated) == (routed, sharded, REPLICATED)
    assert weights.tables == 2 * 1048576 * 64 * 4
    assert weights.total == routed + sharded + REPLICATED + 2 * 1048576 * 64 * 4


def test_kernels_read_wo_a_as_it_is_stored() -> None:
    widened, stored = (weight_bytes(_config("flash"), Layout(tensor_parallel=2), 1, kernels=kernels) for kernels in (False, True))
    assert widened.sharded - stored.sharded == WIDENED // 2
    assert (widened.routed_experts, widened.replicated) == (stored.routed_experts, stored.replicated)


def test_weight_bytes_of_other_formats() -> None:
    layout = Layout()
    fp8 = weight_bytes(_config("flash", expert_dtype="fp8"), layout, 1)
    assert fp8.routed_experts == 43 * 256 * (2 * _fp8(2048, 4096) + _fp8(4096, 2048))
    plain = weight_bytes(_config("flash", quantized=False), layout, 1, dtype_bytes=4)
    assert plain.routed_experts == 43 * 256 * 3 * 2048 * 4096 * 4
    odd = weight_bytes(_config("tiny", vocab_size=1000), layout, 1).sharded - weight_bytes(_config("tiny"), layout, 1).sharded
    assert odd == 0, "1000 rows are padded to 1024"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor_parallel=3), "3 does not divide the model's o_groups = 8"),
        (Layout(tensor_parallel=16), "16 does not divide"),
        (Layout(tensor_parallel=8, data_parallel=4), "32 ranks cut the routed experts"),
    ],
)
def test_impossible_layouts(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout.check(_config("flash"))
    Layout(tensor_parallel=8, data_parallel=4, expert_parallel=True).check(_config("flash"))


def test_flash_pages() -> None:
    """The table of model.md 5.2: page bytes; and block sizes and windows of integration.md 3.1."""
    kinds = {kind.name: (kind.num_layers, kind.block_tokens, kind.page_bytes, kind.window) for kind in cache_kinds(_config("flash"), True)}
    assert kinds == {
        "window": (43, 64, 37440, 128),
        "entries, ratio 4": (21, 256, 37440, None),
        "entries, ratio 128": (20, 256, 1728, None),
        "indexer keys": (21, 256, 8640, None),
        "compressor state, ratio 4": (21, 4, 32832, 8),
        "compressor state, ratio 128": (20, 8, 32832, 128),
        "indexer state": (21, 4, 8640, 8),
    }


def test_flash_pool_by_hand() -> None:
    """21 of each compressor state of ratio 4 must stay together; 22 a group wastes least over 43 windows, 21 and 20 states."""
    pool = cache_pool(cache_kinds(_config("flash"), True))
    assert sorted(group.bytes_per_block for group in pool.groups) == sorted(
        [22 * 37440, 21 * 37440, 21 * (37440 + 8640) + 20 * 1728, 21 * (32832 + 8640), 20 * 32832]
    )
    assert pool.bytes_per_block == 1002240
    assert pool.bytes_per_token == 1002240 / 256 == 3915
    # A request of a million tokens with 16384 in flight.
    blocks = 4096 + 2 * (-(-(127 + 16384) // 64) + 1) + (-(-(7 + 16384) // 4) + 1) + (-(-(127 + 16384) // 8) + 1)
    assert pool.blocks_per_request(1048576, 16384) == blocks
    assert pool.window_blocks(1) == 2 * (2 + 1) + (2 + 1) + (16 + 1)
    # Short requests need no more than their tokens.
    assert pool.blocks_per_request(5, 16384) == 1 + 2 * 2 + (2 + 1) + 2
    assert pool.max_concurrency(10 * blocks * 1002240, 1048576, 16384) == 10
    # One block is never handed out.
    assert pool.longest_context((blocks + 1) * 1002240, 16384, 1 << 20) == 1 << 20
    assert pool.longest_context(blocks * 1002240, 16384, 1 << 20) == (1 << 20) - 256
    assert pool.longest_context(3 * 1002240, 16384, 1 << 20) == 0


RATIOS: dict[str, list[int]] = {
    "flash": list(_config("flash").compress_ratios),
    "pro": list(_config("pro").compress_ratios),
    "tiny": [0, 0, 4, 128, 4],
    "only-windows": [0] * 5,
    "only-4": [4] * 7,
    "only-128": [128] * 30,
    "balanced": [4, 128] * 6,
    "no-4": [0] * 9 + [128] * 3,
    "no-4-many-windows": [0] * 40 + [128],
    "windows-and-4": [0] * 10 + [4] * 3,
    **{f"random{seed}": random.Random(seed).choices([0, 4, 128], k=random.Random(seed).randint(1, 70)) for seed in range(25)},
}


def _planner(function: str) -> Any:
    """A function of vLLM's cache planner; 0.33 split the module."""
    pytest.importorskip("vllm")
    for name in ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, function):
            return getattr(module, function)
    pytest.fail(f"no module of this vLLM has {function}")


def _vllm_config(max_model_len: int, in_flight: int, dtype: torch.dtype) -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len, dtype=dtype),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None, indexer_kv_dtype="auto"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        speculative_config=None,
        max_in_flight_tokens=in_flight,
    )


def _engine_specs(config: Dsv4Config, vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The specs of the caches that the engine would create, by the names of their layers."""
    cache = pytest.importorskip("vllm_dsv4.attention.cache")
    from vllm_dsv4.quantization.formats import CompressorStateFormat

    layers: dict[str, Any] = {}
    current = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    monkeypatch.setattr(cache, "get_current_vllm_config", lambda: current)
    factory = cache.CacheFactory(config, vllm_config)
    for layer, ratio in enumerate(config.compress_ratios):
        factory.window(f"layers.{layer}.window")
        if ratio:
            factory.entries(f"layers.{layer}.entries", ratio)
            factory.compressor_state(f"layers.{layer}.state", CompressorStateFormat(config.head_dim, ratio))
        if ratio == 4:
            factory.indexer_keys(f"layers.{layer}.keys", ratio)
            factory.compressor_state(f"layers.{layer}.indexer_state", CompressorStateFormat(config.index_head_dim, ratio))
    return {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}


@pytest.mark.parametrize("quantized", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("case", RATIOS)
def test_pool_equals_vllms_planner(case: str, quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, capacity and longest context of the caches that the engine declares, as vLLM itself plans them."""
    ratios = RATIOS[case]
    config = _config("flash", quantized=quantized, num_hidden_layers=len(ratios), compress_ratios=ratios)
    max_model_len, in_flight, memory = 200_000, 2 * 8192, 40 * GIB
    vllm_config = _vllm_config(max_model_len, in_flight, torch.float32)
    groups = _planner("get_kv_cache_groups")(vllm_config, _engine_specs(config, vllm_config, monkeypatch))
    planned = _planner("get_kv_cache_config_from_groups")(vllm_config, groups, memory)

    pool = cache_pool(cache_kinds(config, packed=quantized, row_bytes=4))
    assert memory // pool.bytes_per_block == planned.num_blocks
    assert len(groups) == len(pool.groups)
    concurrency = _planner("get_max_concurrency_for_kv_cache_config")(vllm_config, planned)
    assert pool.max_concurrency(memory, max_model_len, in_flight) == pytest.approx(concurrency, rel=1e-12)
    tight = 3 * pool.bytes_per_block * pool.blocks_per_request(1000, in_flight)
    longest = pool.longest_context(tight, in_flight, max_model_len)
    usable = tight // pool.bytes_per_block - 1  # vLLM holds one block back
    assert longest >= 1000
    assert _blocks_needed(groups, vllm_config, longest) <= usable < _blocks_needed(groups, vllm_config, longest + 1)


def _blocks_needed(groups: list[Any], vllm_config: Any, num_tokens: int) -> int:
    vllm_config.model_config.max_model_len = num_tokens
    specs = [group.kv_cache_spec for group in groups]
    return sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)


H200 = Device("gpu", "NVIDIA H200", 141 * 10**9, 140 * 10**9, "sm_90")
LAPTOP = Device("cpu", "A CPU, 2 cores", 16 * GIB, 15 * GIB, flags=("avx2",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts the doctor on a described machine, with a working vLLM and plugin."""
    for variable in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_PLUGINS", "VLLM_DSV4_DISABLE", "VLLM_DSV4_FORCE", "VLLM_DSV4_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    entry = SimpleNamespace(name="dsv4", value="vllm_dsv4.plugin:register")
    monkeypatch.setattr(environment.metadata, "entry_points", lambda group: [entry])

    def describe(*devices: Device, vllm: VllmStatus | None = None) -> None:
        monkeypatch.setattr(environment, "devices", lambda: list(devices))
        monkeypatch.setattr(environment, "inspect_vllm", lambda: vllm or VllmStatus("0.33.0"))
        if devices[0].capability is not None:
            major, minor = divmod(int(devices[0].capability.removeprefix("sm_")), 10)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (major, minor))
        backend._select.cache_clear()

    describe(LAPTOP)
    yield describe
    backend._select.cache_clear()


def _doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_flash_on_eight_described_gpus(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = _doctor(capsys, "--gpus", "8", "--gpu-memory", "80GiB")
    weights = ROUTED // 8 + (SHARDED - WIDENED) // 8 + REPLICATED + 2 * 1048576 * 64 * 4
    assert (code, report["ok"], report["blocking"]) == (0, True, [])
    fit = report["fit"]
    assert fit["weight_bytes"]["total"] == weights
    kv_bytes = int(80 * GIB * 0.92) - weights - 4 * GIB
    assert fit["kv_cache"]["total_bytes"] == kv_bytes
    # 8192 tokens a step on an 80 GiB device, and two steps in flight.
    assert fit["kv_cache"]["in_flight_tokens"] == 16384
    blocks = 4096 + 2 * 259 + 4099 + 2065
    assert fit["kv_cache"]["max_concurrency"] == pytest.approx(kv_bytes // 1002240 / blocks)
    assert fit["kv_cache"]["tokens"] == int(kv_bytes // 1002240 / blocks * 1048576)
    assert fit["kv_cache"]["longest_context"] == 1048576
    assert fit["kv_cache"]["bytes_per_token"] == 3915
    assert fit["kv_cache"]["decoding_request_bytes"] == 26 * 1002240


def test_context_that_does_not_fit_is_a_warning_unless_asked_for(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("flash", "--gpus", "2", "--gpu-memory", "89GiB", "--max-num-batched-tokens", "2048")
    code, report = _doctor(capsys, *plan)
    longest = report["fit"]["kv_cache"]["longest_context"]
    assert code == 0 and 0 < longest < 1048576 and f"--max-model-len {longest}" in report["warnings"][0]
    # The RoPE tables shrink with the context, so what was the longest fits with room to spare.
    assert _doctor(capsys, *plan, "--max-model-len", str(longest))[0] == 0
    code, report = _doctor(capsys, *plan, "--max-model-len", "1048576")
    assert code == 1 and "1,048,576 tokens do not fit" in report["blocking"][0]


def test_weights_that_do_not_fit_block(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = _doctor(capsys, "flash", "--gpus", "1", "--gpu-memory", "80GB")
    assert code == 1 and "leave no memory for the KV cache" in report["blocking"][0]
    assert report["fit"]["kv_cache"]["tokens"] == 0


def test_gpus_of_this_machine(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(H200, H200)
    code, report = _doctor(capsys)
    assert code == 0 and report["fit"]["gpus"] == 2 and report["fit"]["memory_bytes"] == 141 * 10**9
    assert report["devices"][1]["capability"] == "sm_90" and report["backend"]["name"] == "triton"
    code, report = _doctor(capsys, "--gpus", "4")
    assert code == 1 and "4 GPUs are asked for, this machine has 2" in report["blocking"][0]


def test_gpu_without_kernels(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(Device("gpu", "Tesla T4", 16 * GIB, 16 * GIB, "sm_75"))
    _, report = _doctor(capsys, "tiny")
    assert report["backend"]["name"] == "reference" and "no kernels for this cuda device" in report["backend"]["reason"]


def test_busy_device_is_a_warning(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine(Device("gpu", "NVIDIA H200", 141 * 10**9, 71 * 10**9, "sm_90"))
    _, report = _doctor(capsys, "tiny")
    assert "--gpu-memory-utilization 0.50" in report["warnings"][0]
    machine(Device("cpu", "A CPU", 16 * GIB, 8 * GIB))
    _, report = _doctor(capsys, "tiny")
    assert "VLLM_CPU_KVCACHE_SPACE" in report["warnings"][0]


def test_cpu_kv_space(machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    code, report = _doctor(capsys, "tiny")
    assert (code, report["fit"]["device"], report["fit"]["kv_cache"]["total_bytes"]) == (0, "cpu", 3 * GIB)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "16")
    code, report = _doctor(capsys, "tiny")
    assert code == 1 and "VLLM_CPU_KVCACHE_SPACE need" in report["blocking"][0]


@pytest.mark.parametrize(
    ("vllm", "environ", "message"),
    [
        (VllmStatus("0.34.1"), {}, "vLLM 0.34.1 is not supported (>=0.32,<0.34)"),
        (VllmStatus("0.31.0"), {}, "vLLM 0.31.0 is not supported"),
        (VllmStatus(None, "ModuleNotFoundError: No module named 'vllm'"), {}, "pip install 'vllm_dsv4[gpu]'"),
        (VllmStatus(None, "RuntimeError: operator torchvision::nms does not exist"), {}, "pip uninstall torchvision"),
        (VllmStatus("0.33.0"), {"VLLM_DSV4_DISABLE": "1"}, "VLLM_DSV4_DISABLE=1"),
        (VllmStatus("0.33.0"), {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other"),
        (VllmStatus("0.33.0"), {"VLLM_DSV4_BACKEND": "nope"}, "'nope' is not a backend"),
    ],
)
def test_environment_problems_block(
    machine: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    vllm: VllmStatus,
    environ: dict[str, str],
    message: str,
) -> None:
    machine(LAPTOP, vllm=vllm)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, report = _doctor(capsys, "tiny")
    assert code == 1 and len(report["blocking"]) == 1 and message in report["blocking"][0]
    # Planning for another machine, they are no obstacle.
    code, report = _doctor(capsys, "tiny", "--gpu-memory", "24GiB")
    assert code == 0 and any(message in warning for warning in report["warnings"])


def test_supported_versions_pass(machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.32.0", "0.33.1.dev5+g123", "0.33.0+cpu"):
        machine(LAPTOP, vllm=VllmStatus(version))
        assert _doctor(capsys, "tiny")[0] == 0
    machine(LAPTOP, vllm=VllmStatus("0.40.0"))
    monkeypatch.setenv("VLLM_DSV4_FORCE", "1")
    assert _doctor(capsys, "tiny")[0] == 0


def test_missing_entry_point_blocks(machine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.metadata, "entry_points", lambda group: [])
    code, report = _doctor(capsys, "tiny")
    assert code == 1 and "entry point is not installed" in report["blocking"][0]


def test_checkpoint_folder_is_checked(machine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, preset_config("tiny", num_hidden_layers=1))
    code, report = _doctor(capsys, str(tmp_path))
    assert code == 0 and report["model"]["weight_files"] == len(list(tmp_path.glob("*.safetensors")))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_attention_heads": 8}))
    code, report = _doctor(capsys, str(tmp_path))
    assert code == 1 and "layers.0.attn.attn_sink is [4], expected [8]" in report["blocking"][0]
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    code, report = _doctor(capsys, str(tmp_path))
    assert code == 1 and "holds no safetensors files" in report["blocking"][0]


def test_unsupported_model_blocks(machine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(preset_config("flash", compress_ratios=[7] * 43)))
    code, report = _doctor(capsys, str(file))
    assert code == 1 and "compress ratio 7" in report["blocking"][0] and report["fit"] is None
    code, report = _doctor(capsys, "flash", "--gpus", "3", "--gpu-memory", "200GiB")
    assert code == 1 and "does not divide" in report["blocking"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is neither a folder, a file nor one of"),
        (["FOLDER"], "has no config.json"),
        (["flash", "--gpus", "0"], "--gpus 0 must be a positive multiple"),
        (["flash", "--gpus", "8", "--data-parallel", "3"], "--gpus 8 must be a positive multiple of --data-parallel 3"),
    ],
)
def test_bad_arguments(machine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str) -> None:
    arguments = [str(tmp_path) if argument == "FOLDER" else argument for argument in arguments]
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_text_report(machine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpus", "8", "--gpu-memory", "80GiB"]) == 0
    text = capsys.readouterr().out
    assert "43 layers: 2 window only, 21 of ratio 4, 20 of ratio 128" in text
    assert "Fit on 8 GPUs of 80.00 GiB (tensor parallel 8, data parallel 1), per GPU" in text
    assert "3,915 bytes a token" in text and text.rstrip().endswith("nothing blocks serving this model")
    assert main(["doctor"]) == 1
    assert "Blocks serving: the weights" in capsys.readouterr().out


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing replaced: what is found here is what torch and the kernel say."""
    assert main(["doctor", "tiny", "--json"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert len(report["devices"]) == max(1, torch.cuda.device_count())
    assert report["devices"][0]["total_bytes"] > GIB and report["devices"][0]["free_bytes"] > 0
    assert report["backend"]["name"] and report["backend"]["reason"]
    try:
        import vllm
    except ImportError:
        assert report["versions"]["vllm"] is None
    else:
        assert report["versions"]["vllm"] == vllm.__version__


def test_failing_import_of_vllm_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libnvrtc.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status = environment.inspect_vllm()
    assert status.version is None and "libnvrtc" in (status.error or "")
    (tmp_path / "vllm.py").write_text("import os; os.abort()")
    assert environment.inspect_vllm().error
    (tmp_path / "vllm.py").write_text("import time; time.sleep(60)")
    assert "longer than 1 s" in (environment.inspect_vllm(timeout_s=1).error or "")
    (tmp_path / "vllm.py").write_text("print('noise'); LLM = None; __version__ = '0.33.0'")
    assert environment.inspect_vllm() == VllmStatus("0.33.0")


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 << 30), ("80", 80 << 30), ("80GB", 80 * 10**9), ("1.5GiB", 3 << 29), ("512 MiB", 512 << 20), ("2tb", 2 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80XB", "-3GiB", "0", "1.2.3GiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)
