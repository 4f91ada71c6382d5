"""Lower packages never import higher ones, and heavy optional packages stay where they belong."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("videospark").origin).parent
ALLOWED = {
    "core": set(),
    "attention": {"core"},
    "quantization": {"core"},
    "tiny": {"core", "attention"},
    "pipelines": {"core", "attention", "quantization"},
    "evaluation": {"core", "attention", "pipelines", "tiny"},
    "distill": {"core", "attention", "quantization", "pipelines", "tiny", "evaluation"},
    "benchmarks": {"core", "attention", "quantization", "pipelines", "tiny", "evaluation"},
    "app": {"core", "attention", "quantization", "pipelines", "tiny", "evaluation", "distill", "benchmarks"},
}
HOME_OF_HEAVY = {"gradio": "page*.py", "ray": "ray_batch.py", "triton": "triton_kernels.py"}


def module_files(package: str) -> list[Path]:
    return sorted((PACKAGE / package).rglob("*.py"))


def at_module_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run on import; those under `if TYPE_CHECKING` and in functions do not."""
    found: list[ast.stmt] = []
    queue: list[ast.AST] = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            queue.extend(node.orelse)
            continue
        if isinstance(node, ast.stmt):
            found.append(node)
            queue.extend(ast.iter_child_nodes(node))
    return found


def imported_packages(path: Path, statements) -> set[str]:
    """First-level packages of videospark that the import statements name, relative ones resolved."""
    parts = ("videospark", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in statements:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            names = [f"{module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("videospark.")}
    return found & set(ALLOWED)


@pytest.mark.parametrize("package", ALLOWED)
def test_no_module_imports_a_higher_layer(package):
    files = module_files(package)
    assert files
    for path in files:
        found = imported_packages(path, at_module_level(ast.parse(path.read_text(encoding="utf-8"))))
        assert found <= ALLOWED[package] | {package}, f"{path.relative_to(PACKAGE)} imports {sorted(found)}"


def test_the_reader_of_imports_resolves_relative_ones():
    source = "from ...pipelines.recipe import Recipe\nfrom .. import backends\nfrom ...tiny import dataset"
    path = PACKAGE / "attention" / "block_sparse" / "gather.py"
    assert imported_packages(path, ast.parse(source).body) == {"attention", "pipelines", "tiny"}


@pytest.mark.parametrize("heavy", HOME_OF_HEAVY)
def test_heavy_optional_packages_are_imported_in_their_files_alone(heavy):
    for package in ALLOWED:
        for path in module_files(package):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in at_module_level(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                uses = any(name.split(".")[0] == heavy for name in names)
                assert not uses or path.match(HOME_OF_HEAVY[heavy]), f"{path.relative_to(PACKAGE)} imports {heavy}"
