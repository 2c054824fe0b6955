"""Reads Python packages as syntax trees: what a module defines, what a function takes, what a class has. Imports nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Signature:
    """Parameters of a callable, without ``self`` or ``cls``."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    var_positional: bool = False
    var_keyword: bool = False

    def problems(self, num_positional: int, keywords: set[str], complete: bool = True) -> list[str]:
        """Why a call does not fit; ``complete`` False: more arguments may come from a ``*`` or ``**`` of the call."""
        found = []
        if num_positional > len(self.positional) and not self.var_positional:
            found.append(f"takes {len(self.positional)} positional arguments, {num_positional} given")
        names = {*self.positional[num_positional:], *self.keyword_only}
        if not self.var_keyword and (unknown := keywords - names):
            found.append(f"has no parameter {', '.join(sorted(unknown))}")
        missing = self.required - set(self.positional[:num_positional]) - keywords
        if complete and missing:
            found.append(f"also needs {', '.join(sorted(missing))}")
        return found


class Sources:
    """One package; modules are named in full (``vllm.config``), and classes and functions as ``module:Name``."""

    def __init__(self, package: Path):
        self.package = package
        self.tree = cache(self._tree)

    def text(self, module: str) -> str:
        path = self._path(module)
        return "" if path is None else path.read_text()

    def modules(self) -> Iterator[str]:
        for path in sorted(self.package.rglob("*.py")):
            parts = path.relative_to(self.package.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def find(self, module: str, name: str) -> tuple[str, Definition] | None:
        """The definition of a name, behind all re-exports, and the module that it stands in."""
        for statement in _statements(self.tree(module)):
            if isinstance(statement, ast.ImportFrom):
                origin = self._origin(module, statement)
                for alias in statement.names:
                    if alias.name == "*" and (found := self.find(origin, name)):
                        return found
                    if (alias.asname or alias.name) == name:
                        return self.find(origin, alias.name)
            elif name in _defined_names(statement):
                assert isinstance(statement, Definition)
                return module, statement
        return None

    def ancestry(self, target: str) -> list[tuple[str, ast.ClassDef]]:
        """The class and its bases within the package, nearest first."""
        module, _, name = target.partition(":")
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            raise LookupError(f"{module} has no class {name}")
        lineage = [found]
        for base in found[1].bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(expression, ast.Name) and (origin := self.find(found[0], expression.id)) and isinstance(origin[1], ast.ClassDef):
                lineage += self.ancestry(f"{origin[0]}:{expression.id}")
        return lineage

    def members(self, target: str) -> set[str]:
        """Fields, methods, and attributes that a method sets, inherited ones too."""
        names: set[str] = set()
        for _, definition in self.ancestry(target):
            for statement in definition.body:
                names.update(_defined_names(statement))
            for node in ast.walk(definition):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    names.add(node.attr)
        return names

    def methods(self, target: str) -> dict[str, ast.FunctionDef]:
        methods: dict[str, ast.FunctionDef] = {}
        for _, definition in self.ancestry(target):
            for statement in definition.body:
                if isinstance(statement, ast.FunctionDef):
                    methods.setdefault(statement.name, statement)
        return methods

    def signature(self, target: str) -> Signature:
        """Of ``module:function``, ``module:Class`` (its construction) or ``module:Class.method``."""
        module, _, path = target.partition(":")
        name, _, method = path.partition(".")
        found = self.find(module, name)
        if found is not None and isinstance(found[1], ast.FunctionDef):
            return signature_of(found[1], is_method=False)
        methods = self.methods(f"{module}:{name}")
        if not method and "__init__" not in methods:
            return self._fields(target)
        if (method or "__init__") not in methods:
            raise LookupError(f"{module}:{name} has no method {method}")
        return signature_of(methods[method or "__init__"], is_method=True)

    def _fields(self, target: str) -> Signature:
        """Construction of a dataclass. Fields with a default of any kind may be left out."""
        fields: dict[str, bool] = {}
        for _, definition in reversed(self.ancestry(target)):
            for statement in definition.body:
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                    fields[ast.unparse(statement.target)] = statement.value is None
        return Signature(tuple(fields), (), frozenset(name for name, required in fields.items() if required))

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        if statement.level == 0:
            return statement.module or ""
        path = self._path(module)
        assert path is not None
        parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        parts = parts[: len(parts) - statement.level + 1]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    def _path(self, module: str) -> Path | None:
        root, *parts = module.split(".")
        if root != self.package.name:
            return None
        path = self.package.joinpath(*parts)
        candidates = (path / "__init__.py", path.with_suffix(".py"))
        return next((candidate for candidate in candidates if candidate.exists()), None)

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self.text(module))


def signature_of(function: ast.FunctionDef, is_method: bool) -> Signature:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = set(positional[: len(positional) - len(arguments.defaults)])
    if is_method and not has_decorator(function, "staticmethod"):
        required.discard(positional.pop(0))
    keyword_only = [argument.arg for argument in arguments.kwonlyargs]
    required |= {name for name, default in zip(keyword_only, arguments.kw_defaults, strict=True) if default is None}
    return Signature(tuple(positional), tuple(keyword_only), frozenset(required), arguments.vararg is not None, arguments.kwarg is not None)


def has_decorator(function: ast.FunctionDef, name: str) -> bool:
    return any(ast.unparse(decorator).split(".")[-1] == name for decorator in function.decorator_list)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if`` and ``try`` too."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop(0)
        if isinstance(statement, ast.If | ast.Try):
            handlers = statement.handlers if isinstance(statement, ast.Try) else []
            pending[:0] = [*statement.body, *(inner for handler in handlers for inner in handler.body), *statement.orelse]
        else:
            yield statement


def _defined_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef() | ast.FunctionDef():
            return [statement.name]
        case ast.Assign():
            return [target.id for target in statement.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name()):
            return [statement.target.id]
    return []
