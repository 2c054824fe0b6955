"""The house rules that a machine can check: one name for an op everywhere, and vLLM only where it may be imported."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import vllm_dsv4
from vllm_dsv4.ops import OPS

PACKAGE = Path(vllm_dsv4.__file__).parent
ROOT = PACKAGE.parent
MAY_IMPORT_VLLM = {"compat.py", "plugin.py"}
MAY_IMPORT_VLLM_LAZILY = {"cli"}
NEVER_NEEDS_VLLM = ("kernels", "reference", "checkpoint", "config.py", "ops.py", "backend.py", "envs.py", "quantization/formats.py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """Modules that a file imports, each with whether it does so at module level."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found += [(name, node in tree.body) for name in names]
    return found


def sources(*names: str) -> list[Path]:
    return [path for name in names for path in ((PACKAGE / name).rglob("*.py") if (PACKAGE / name).is_dir() else [PACKAGE / name])]


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_reference_and_a_test(name: str) -> None:
    reference = getattr(import_module(f"vllm_dsv4.reference.{name}"), f"{name}_ref")
    assert inspect.getdoc(reference), f"{name}_ref has no docstring"
    assert (ROOT / f"tests/kernels/test_{name}.py").exists()


@pytest.mark.parametrize("name", OPS)
def test_the_architecture_page_lists_every_op_with_its_arguments(name: str) -> None:
    rows = re.findall(rf"^\| `{name}` \| `\((.*?)\)` →", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert len(rows) == 1, f"docs/architecture.md must have one row for {name}"
    listed = re.sub(r" \[[^\]]*\]| (f32|int64|int32|float8_e4m3fn|float32)\b", "", rows[0])
    names = [argument.split("=")[0].strip().split(" ")[0] for argument in listed.split(", ")]
    reference = getattr(import_module(f"vllm_dsv4.reference.{name}"), f"{name}_ref")
    assert names == list(inspect.signature(reference).parameters)


def test_the_architecture_page_lists_no_other_op() -> None:
    table = (ROOT / "docs/architecture.md").read_text().split("| op |")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(OPS)


def test_every_kernel_has_its_partners() -> None:
    kernels = [path.stem for path in (PACKAGE / "kernels").glob("*.py") if path.stem in OPS]
    missing = [name for name in kernels if not (ROOT / f"benchmarks/bench_{name}.py").exists()]
    assert not missing, f"kernels without a benchmark: {missing}"


def test_vllm_is_imported_where_it_may_be() -> None:
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE)
        for module, at_top in imports(path):
            if module.split(".")[0] != "vllm":
                continue
            lazily = where.parts[0] in MAY_IMPORT_VLLM_LAZILY and not at_top
            assert where.as_posix() in MAY_IMPORT_VLLM or lazily, f"{where} imports {module}"


def test_ops_run_without_vllm() -> None:
    """Neither directly nor through our own modules that import it."""
    needs_vllm = (
        "compat",
        "plugin",
        "engine_options",
        "parallel",
        "attention",
        "moe",
        "model",
        "quantization.config",
        "quantization.linear",
    )
    for path in sources(*NEVER_NEEDS_VLLM):
        for module, _ in imports(path):
            assert module.split(".")[0] != "vllm", f"{path.name} imports {module}"
            inner = module.removeprefix("vllm_dsv4.")
            assert inner == module or not inner.startswith(needs_vllm), f"{path.name} imports {module}, which needs vLLM"
