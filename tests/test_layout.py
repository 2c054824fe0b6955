"""The house rules that a machine can check: one name for an op everywhere, and vLLM only where it may be imported."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
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


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Absolute names that a file imports (of ``from a import b``: a.b), each with whether only a function does so."""
    package = path.relative_to(ROOT).parent.parts

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*parents, *([node.module] if node.module else [])))
            yield from ((f"{module}.{alias.name}", lazy) for alias in node.names)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy)

    return visit(ast.parse(path.read_text()), False)


def imports_vllm(path: Path) -> list[tuple[str, bool]]:
    return [(name, lazy) for name, lazy in imports(path) if name.split(".")[0] == "vllm"]


def reached(paths: list[Path]) -> set[Path]:
    """Our files that importing these files, or calling what they define, may load."""
    found: set[Path] = set()
    while paths:
        path = paths.pop()
        if path in found:
            continue
        found.add(path)
        for name, _ in imports(path):
            parts = name.split(".")
            modules = [ROOT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
            paths += [file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file()]
    return found


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
    """What kernels share is in files that begin with an underscore."""
    kernels = [path.stem for path in (PACKAGE / "kernels").glob("*.py") if not path.stem.startswith("_")]
    partners = [file for name in kernels for file in (PACKAGE / f"reference/{name}.py", ROOT / f"benchmarks/bench_{name}.py")]
    missing = [file.relative_to(ROOT).as_posix() for file in partners if not file.exists()]
    assert not missing, f"kernels without a reference or a benchmark: {missing}"


def test_vllm_is_imported_where_it_may_be() -> None:
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE)
        for name, lazy in imports_vllm(path):
            lazily = lazy and where.parts[0] in MAY_IMPORT_VLLM_LAZILY
            assert where.as_posix() in MAY_IMPORT_VLLM or lazily, f"{where} imports {name}"


@pytest.mark.parametrize("name", NEVER_NEEDS_VLLM)
def test_runs_without_vllm(name: str) -> None:
    """Neither directly nor through our own modules that import it."""
    source = PACKAGE / name
    files = list(source.rglob("*.py")) if source.is_dir() else [source]
    assert files
    for path in reached(files):
        assert not imports_vllm(path), f"{name} reaches {path.relative_to(PACKAGE)}, which imports vLLM"
