"""The entry point: what it registers with vLLM, when it stands aside, and how it is switched off.

Registration changes vLLM's global state, so each case that registers runs in a process of its own and prints what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from vllm_dsv4.plugin import is_supported, register

pytest.importorskip("vllm")

PRELUDE = """
import json, logging, sys
import torch, vllm

warnings = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("vllm.vllm_dsv4").addHandler(handler)

def report():
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.registry import ModelRegistry

    print(json.dumps({
        "models": {name: getattr(model, "module_name", "") for name, model in ModelRegistry.models.items() if "DeepseekV4" in name},
        "options": sorted(name for name, hook in MODELS_CONFIG_MAP.items() if hook.__module__.startswith("vllm_dsv4")),
        "quantization": [name for name in QUANTIZATION_METHODS if name == "dsv4"],
        "warnings": warnings,
        "cuda": torch.cuda.is_initialized(),
        "imported": sorted(name for name in sys.modules if name.startswith("vllm_dsv4.")),
    }))
"""
REGISTER = "from vllm_dsv4.plugin import register\nregister()\n"
ARCHITECTURES = ["DeepseekV4FlashForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"]


def run(code: str, **environment: str) -> list[dict[str, Any]]:
    """What each ``report()`` in ``code`` found, and one at its end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    command = [sys.executable, "-c", f"{PRELUDE}\n{code}\nreport()"]
    result = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"models"')]


def ours(state: dict[str, Any]) -> list[str]:
    return sorted(name for name, module in state["models"].items() if module.startswith("vllm_dsv4"))


def assert_stands_aside(state: dict[str, Any]) -> None:
    assert ours(state) == [] and state["options"] == [] and state["quantization"] == []
    assert "DeepseekV4ForCausalLM" in state["models"]  # vLLM's own


def test_entry_points() -> None:
    assert entry_points(group="vllm.general_plugins")["dsv4"].value == "vllm_dsv4.plugin:register"
    assert entry_points(group="console_scripts")["vllm-dsv4"].value == "vllm_dsv4.cli.main:main"


def test_registers_twice_without_a_trace_of_the_second_time() -> None:
    once, twice = run(REGISTER + "report()\nregister()")
    assert ours(once) == ARCHITECTURES == once["options"]
    assert once["quantization"] == ["dsv4"]
    assert once["warnings"] == [] and not once["cuda"]
    # Cheap: the model and its kernels are left to the processes that build it.
    assert not [name for name in once["imported"] if name.startswith(("vllm_dsv4.model", "vllm_dsv4.attention", "vllm_dsv4.kernels."))]
    assert twice == once


LOAD_PLUGINS = "from vllm.plugins import load_general_plugins\nload_general_plugins()"


def test_vllm_loads_it() -> None:
    (state,) = run(LOAD_PLUGINS)
    assert ours(state) == ARCHITECTURES


def test_vllm_plugins_leaves_it_out() -> None:
    (state,) = run(LOAD_PLUGINS, VLLM_PLUGINS="another")
    assert_stands_aside(state)


def test_disabled() -> None:
    (state,) = run(REGISTER, VLLM_DSV4_DISABLE="1")
    assert_stands_aside(state)
    assert state["warnings"] == []


def test_unsupported_version_warns_once_and_stands_aside() -> None:
    (state,) = run(f"vllm.__version__ = '0.34.0'\n{REGISTER}register()")
    assert_stands_aside(state)
    (warning,) = state["warnings"]
    assert "0.34.0" in warning and ">=0.32,<0.34" in warning and "VLLM_DSV4_FORCE=1" in warning


def test_unsupported_version_forced() -> None:
    (state,) = run(f"vllm.__version__ = '0.34.0'\n{REGISTER}", VLLM_DSV4_FORCE="1")
    assert ours(state) == ARCHITECTURES
    assert state["warnings"] == []


@pytest.mark.parametrize("name", ["VLLM_DSV4_DISABLE", "VLLM_DSV4_FORCE"])
def test_bad_flag(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got 'yes'"):
        register()


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.33.0", True),
        ("0.33.2+cpu", True),
        ("0.33.1rc2.dev7+g1234567", True),
        ("0.31.9", False),
        ("0.34.0rc1", False),
        ("0.320.0", False),
        ("1.32.0", False),
        ("1", False),
        ("dev", False),
        ("", False),
    ],
)
def test_is_supported(version: str, supported: bool) -> None:
    assert is_supported(version) is supported
