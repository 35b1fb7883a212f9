"""What a file imports, whatever the form: the resolver behind the tests of the architecture.

import fenchel.nn.multihead          from fenchel import nn, solve
import fenchel as fl; fl.nn          from . import multihead
from fenchel.nn import convert       importlib.import_module("fenchel.nn")
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """module: where the thing is from, re-exports followed. written: what the file says."""

    module: str
    written: tuple[str, ...]
    line: int


class Tree:
    """Packages below `roots`, folders that are on the path of imports."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots

    def files(self, package: str) -> list[Path]:
        return sorted(path for root in self.roots for path in (root / package).rglob("*.py"))

    def module_of(self, path: Path) -> str:
        root = next(root for root in self.roots if path.is_relative_to(root))
        parts = list(path.relative_to(root).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def is_module(self, name: str) -> bool:
        paths = [root / name.replace(".", "/") for root in self.roots]
        return any(path.with_suffix(".py").is_file() or path.is_dir() for path in paths)

    def imports(self, path: Path) -> list[Import]:
        """Of every form, resolved: a name that a package re-exports belongs to where it is from."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return [
            Import(
                self._resolved(module, name),
                (*module.split("."), *([name] if name else [])),
                node.lineno,
            )
            for node, module, name in self._named(tree, path)
        ]

    def _named(
        self, tree: ast.Module, path: Path
    ) -> Iterator[tuple[ast.stmt | ast.expr, str, str | None]]:
        packages = {}  # local name -> package that it stands for
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node, alias.name, None
                    packages[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node, path)
                for alias in node.names:
                    yield node, module, alias.name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _loads_by_name(node):
                yield node, node.args[0].value, None  # type: ignore[attr-defined]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                package = packages.get(node.value.id)
                if package is not None and self.is_module(package):
                    yield node, package, node.attr

    def _absolute(self, node: ast.ImportFrom, path: Path) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module_of(path).split(".")
        keep = len(parts) - node.level + (path.name == "__init__.py")
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def _resolved(self, module: str, name: str | None) -> str:
        if name is None:
            return module
        if self.is_module(f"{module}.{name}"):
            return f"{module}.{name}"
        return self._exports(module).get(name, module)

    @cache  # noqa: B019  a tree lives as long as its test
    def _exports(self, module: str) -> dict[str, str]:
        """Names that the package itself imports from its own modules."""
        paths = [root / module.replace(".", "/") / "__init__.py" for root in self.roots]
        return {
            alias.asname or alias.name: node.module
            for path in paths
            if path.is_file()
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            if node.module.startswith(module + ".")
        }


def _loads_by_name(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    written = bool(node.args) and isinstance(node.args[0], ast.Constant)
    return name in ("import_module", "__import__") and written
