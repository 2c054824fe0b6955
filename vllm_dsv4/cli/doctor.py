"""``vllm-dsv4 doctor``: can this machine, or a described one, serve this model, and if not, why?"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_dsv4 import envs
from vllm_dsv4.checkpoint.tiny import PRESETS, preset_config
from vllm_dsv4.cli.fit import CachePool, Layout, WeightBytes, cache_kinds, cache_pool, weight_bytes
from vllm_dsv4.config import ConfigError, Dsv4Config

GIB = 1 << 30
_RESERVE = {"gpu": 4 * GIB, "cpu": 1 * GIB}
"""Memory left for activations, compiled kernels, graphs and the runtime itself: an allowance, not a measurement."""
_EXIT_BLOCKED = 1

_DESCRIPTION = """\
Report versions and devices, which kernels would run, and whether a model fits: weights, KV cache, longest context. Looks at
this machine, or with --gpu-memory at any number of GPUs of that size, on a machine without one too.
Exits with 1 if something blocks serving.
"""


@dataclass
class Report:
    """Everything found. ``blocking`` problems prevent serving; ``warnings`` do not."""

    versions: dict[str, str | None] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    backend: dict[str, str] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] | None = None
    blocking: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def register(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="whether a model can be served here, and why not", description=_DESCRIPTION
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="flash",
        help=f"a checkpoint's folder, a config.json, or one of {', '.join(sorted(PRESETS))} (default: flash)",
    )
    parser.add_argument("--gpus", metavar="N", type=int, help="GPUs to spread the model over (default: all of this machine)")
    parser.add_argument("--gpu-memory", metavar="SIZE", type=parse_size, help="plan for GPUs of this size instead of this machine: 80GiB")
    parser.add_argument("--data-parallel", metavar="N", type=int, default=1, help="data-parallel replicas among the GPUs (default: 1)")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts per GPU instead of slices")
    parser.add_argument("--max-model-len", metavar="N", type=int, help="context that must fit (default: the model's)")
    parser.add_argument("--max-num-batched-tokens", metavar="N", type=int, help="tokens of one step (default: as vLLM's server)")
    parser.add_argument("--gpu-memory-utilization", metavar="F", type=float, default=0.92, help="as vLLM's option (default: 0.92)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "bfloat16"), default="auto", help="as vLLM's option")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the model's activations")
    parser.add_argument("--reserve", metavar="SIZE", type=parse_size, help="memory for all but weights and KV (default: 4GiB, CPU 1GiB)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def parse_size(text: str) -> int:
    """Bytes of "80GiB", "80GB", "512MiB"; a number alone means GiB."""
    match = re.fullmatch(r"([0-9.]+)\s*(?:([KMGT])(i?)B?)?", text.strip(), re.IGNORECASE)
    try:
        value = float(match[1]) if match else -1.0
    except ValueError:
        value = -1.0
    if match is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it as 80GiB")
    unit, binary = match[2] or "G", match[3] is None or bool(match[3])
    return int(value * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1))


def run(args: argparse.Namespace) -> int:
    from vllm_dsv4.cli import environment

    report = Report()
    devices = environment.devices()
    vllm = environment.inspect_vllm()
    report.versions = {**environment.versions(), "vllm": vllm.version}
    report.devices = [asdict(device) for device in devices]
    # When another machine is planned for, this one's state is no obstacle.
    local_problems = report.blocking if args.gpu_memory is None else report.warnings
    local_problems += environment.plugin_problems(vllm)
    try:
        report.backend = environment.backend_choice(devices[0])
    except ValueError as error:
        local_problems.append(str(error))
    _examine_model(args, devices[0], len(devices), report)
    print(json.dumps({**asdict(report), "ok": not report.blocking}, indent=2) if args.json else format_report(report))
    return _EXIT_BLOCKED if report.blocking else 0


def _examine_model(args: argparse.Namespace, device: Any, num_devices: int, report: Report) -> None:
    raw_config = load_model_config(args.model)
    report.model = {"source": args.model}
    gpus = args.gpus if args.gpus is not None else (1 if device.type == "cpu" else num_devices)
    layout = _layout(gpus, args.data_parallel, args.expert_parallel)
    try:
        config = Dsv4Config.from_hf(raw_config)
        layout.check(config)
    except ConfigError as error:
        report.blocking.append(str(error))
        return
    report.model |= describe_model(config)
    _examine_files(args.model, config, report)
    if args.gpu_memory is None and device.type == "gpu" and gpus > num_devices:
        report.blocking.append(f"{gpus} GPUs are asked for, this machine has {num_devices}; plan for others with --gpu-memory")
    report.fit = _fit(args, config, layout, device, report)


def load_model_config(model: str) -> dict[str, Any]:
    """The raw ``config.json`` of a folder, a file or a preset.

    Raises:
        ValueError: there is none, or it is not JSON.
    """
    path = Path(model)
    if not path.exists():
        if model in PRESETS:
            return preset_config(model)
        raise ValueError(f"{model} is neither a folder, a file nor one of {', '.join(sorted(PRESETS))}")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"{path} has no config.json; is it a checkpoint's folder?")
    return read_json(file)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def _layout(gpus: int, data_parallel: int, expert_parallel: bool) -> Layout:
    if gpus < 1 or data_parallel < 1 or gpus % data_parallel:
        raise ValueError(f"--gpus {gpus} must be a positive multiple of --data-parallel {data_parallel}")
    return Layout(gpus // data_parallel, data_parallel, expert_parallel)


def describe_model(config: Dsv4Config) -> dict[str, Any]:
    ratios = {str(ratio): config.compress_ratios.count(ratio) for ratio in (0, 4, 128)}
    experts = "unquantised" if config.quantization is None else config.quantization.experts
    return {
        "layers": config.num_hidden_layers,
        "layers_by_compress_ratio": ratios,
        "routed_experts": config.n_routed_experts,
        "experts_format": experts,
        "max_position_embeddings": config.max_position_embeddings,
    }


def _examine_files(model: str, config: Dsv4Config, report: Report) -> None:
    """Compare the folder's tensors with the configuration, by their headers."""
    from vllm_dsv4.checkpoint.reader import iter_headers, weight_files
    from vllm_dsv4.checkpoint.schema import CheckpointError, check_checkpoint

    if not Path(model).is_dir():
        return
    try:
        files = weight_files(model)
        report.model["weight_files"] = len(files)
        if files:
            check_checkpoint(config, iter_headers(model))
        else:
            report.blocking.append(f"{model} holds no safetensors files")
    except CheckpointError as error:
        report.blocking.append(str(error))


def _fit(args: argparse.Namespace, config: Dsv4Config, layout: Layout, device: Any, report: Report) -> dict[str, Any]:
    on_cpu = args.gpu_memory is None and device.type == "cpu"
    max_model_len = args.max_model_len or config.max_position_embeddings
    dtype_bytes = 4 if args.dtype == "float32" else 2
    weights = weight_bytes(config, layout, max_model_len, dtype_bytes, kernels=not on_cpu and envs.backend() != "reference")
    packed = args.kv_cache_dtype == "fp8" or (args.kv_cache_dtype == "auto" and config.quantization is not None)
    kinds = cache_kinds(config, packed, dtype_bytes if args.kv_cache_dtype == "auto" else 2)
    pool = cache_pool(kinds)
    memory = args.gpu_memory or (device.total_bytes // layout.gpus if on_cpu else device.total_bytes)  # CPU ranks share theirs
    step_tokens = args.max_num_batched_tokens or _default_step_tokens(memory, on_cpu)
    # On a GPU the next step is scheduled while one runs; both hold their tokens.
    in_flight = step_tokens if on_cpu else 2 * step_tokens
    reserve = args.reserve if args.reserve is not None else _RESERVE["cpu" if on_cpu else "gpu"]
    if args.gpu_memory is None:
        _check_free_memory(device, args.gpu_memory_utilization, report)
    kv_bytes = _kv_bytes(memory, args.gpu_memory_utilization, weights.total + reserve, on_cpu, report)
    return {
        "gpus": layout.gpus,
        "layout": asdict(layout),
        "device": "cpu" if on_cpu else "gpu",
        "memory_bytes": memory,
        "weight_bytes": {**asdict(weights), "total": weights.total},
        "reserve_bytes": reserve,
        "kv_cache": {
            "caches": [{**asdict(kind), "bytes_per_token": kind.bytes_per_token} for kind in kinds],
            "bytes_per_block": pool.bytes_per_block,
            "bytes_per_token": pool.bytes_per_token,
            "decoding_request_bytes": pool.window_blocks(in_flight_tokens=1) * pool.bytes_per_block,
            "in_flight_tokens": in_flight,
            **_capacity(pool, weights, kv_bytes, max_model_len, in_flight, args, report),
        },
    }


def _check_free_memory(device: Any, utilization: float, report: Report) -> None:
    """vLLM does not start when less than its share of the device's memory is free."""
    if device.free_bytes >= device.total_bytes * utilization or (device.type == "cpu" and _cpu_kv_space()):
        return
    fraction = int(20 * device.free_bytes / device.total_bytes) / 20
    on_cpu = "; on a CPU it means the machine's memory, and VLLM_CPU_KVCACHE_SPACE=4 (GiB) also does" if device.type == "cpu" else ""
    report.warnings.append(
        f"vLLM wants {utilization:.0%} of the memory free at start, {gib(device.free_bytes)} of {gib(device.total_bytes)} are; "
        f"pass --gpu-memory-utilization {max(fraction, 0.05):.2f} or less{on_cpu}"
    )


def _cpu_kv_space() -> int | None:
    """Bytes that VLLM_CPU_KVCACHE_SPACE (GiB) gives to the KV cache of each CPU rank, if it is set."""
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    return int(space) * GIB if space else None


def _kv_bytes(memory: int, utilization: float, used: int, on_cpu: bool, report: Report) -> int:
    """``memory x utilization - weights - reserve``, unless the environment says it outright."""
    kv_bytes = _cpu_kv_space() if on_cpu else None
    if kv_bytes is None:
        return int(memory * utilization) - used
    if used + kv_bytes > memory:
        need = gib(used + kv_bytes)
        report.blocking.append(f"weights, reserve and VLLM_CPU_KVCACHE_SPACE need {need} together, there are {gib(memory)}")
    return kv_bytes


def _capacity(
    pool: CachePool, weights: WeightBytes, kv_bytes: int, max_model_len: int, in_flight: int, args: argparse.Namespace, report: Report
) -> dict[str, Any]:
    if kv_bytes <= 0:
        report.blocking.append(
            f"the weights ({gib(weights.total)}) leave no memory for the KV cache: {gib(-kv_bytes)} too little; use more or larger GPUs"
        )
        return {"total_bytes": 0, "tokens": 0, "longest_context": 0, "max_model_len": max_model_len, "max_concurrency": 0.0}
    longest = pool.longest_context(kv_bytes, in_flight, max_model_len)
    concurrency = pool.max_concurrency(kv_bytes, max_model_len, in_flight)
    if longest == 0:
        report.blocking.append(f"{gib(kv_bytes)} of KV cache hold not one request; lower --max-num-batched-tokens, or free memory")
    elif longest < max_model_len:
        message = f"{max_model_len:,} tokens do not fit, {longest:,} do; pass --max-model-len {longest} to vLLM"
        (report.blocking if args.max_model_len else report.warnings).append(message)
    return {
        "total_bytes": kv_bytes,
        "tokens": int(concurrency * max_model_len),
        "longest_context": longest,
        "max_model_len": max_model_len,
        "max_concurrency": concurrency,
    }


def _default_step_tokens(memory: int, on_cpu: bool) -> int:
    """vLLM's default --max-num-batched-tokens of a server, by device memory."""
    if on_cpu or memory < 70 * GIB:
        return 2048
    return 16384 if memory >= 160 * GIB else 8192


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.2f} MiB"


def format_report(report: Report) -> str:
    lines = ["Versions", "  " + ", ".join(f"{name} {version or 'not found'}" for name, version in report.versions.items()), "Devices"]
    for device in report.devices:
        details = device["capability"] or " ".join(device["flags"])
        lines.append(f"  {device['type']}: {device['name']}, {gib(device['free_bytes'])} of {gib(device['total_bytes'])} free, {details}")
    if report.backend:
        lines.append(f"  ops: {report.backend['name']} ({report.backend['reason']})")
    lines += ["Model", *_format_model(report.model)]
    if report.fit:
        lines += _format_fit(report.fit)
    lines += [f"Warning: {warning}" for warning in report.warnings]
    lines += [f"Blocks serving: {problem}" for problem in report.blocking]
    lines.append("Result: " + ("cannot serve this model" if report.blocking else "nothing blocks serving this model"))
    return "\n".join(lines)


def _format_model(model: dict[str, Any]) -> list[str]:
    lines = [f"  {model['source']}"]
    if "layers" in model:
        ratios = model["layers_by_compress_ratio"]
        lines.append(f"  {model['layers']} layers: {ratios['0']} window only, {ratios['4']} of ratio 4, {ratios['128']} of ratio 128")
        lines.append(f"  {model['routed_experts']} routed experts ({model['experts_format']}) in each")
    if "weight_files" in model:
        lines.append(f"  {model['weight_files']} weight files")
    return lines


def _format_fit(fit: dict[str, Any]) -> list[str]:
    layout, weights, kv = fit["layout"], fit["weight_bytes"], fit["kv_cache"]
    unit = "CPU rank" if fit["device"] == "cpu" else "GPU"
    experts = ", expert parallel" if layout["expert_parallel"] else ""
    title = f"Fit on {fit['gpus']} {unit}{'s' if fit['gpus'] > 1 else ''} of {gib(fit['memory_bytes'])}"
    return [
        f"{title} (tensor parallel {layout['tensor_parallel']}, data parallel {layout['data_parallel']}{experts}), per {unit}",
        f"  weights   {gib(weights['total'])}: routed experts {gib(weights['routed_experts'])}, other split {gib(weights['sharded'])}, "
        f"replicated {gib(weights['replicated'])}, RoPE tables {gib(weights['tables'])}",
        f"  reserve   {gib(fit['reserve_bytes'])}: allowance for activations and the runtime",
        f"  KV cache  {gib(kv['total_bytes'])}: {kv['bytes_per_token']:,.0f} bytes a token, in blocks of {gib(kv['bytes_per_block'])}; "
        f"{gib(kv['decoding_request_bytes'])} more for each request that decodes",
        f"  context   {kv['longest_context']:,} of {kv['max_model_len']:,} tokens at most; "
        f"{kv['max_concurrency']:.2f} requests of {kv['max_model_len']:,} at once, {kv['tokens']:,} KV tokens",
    ]
