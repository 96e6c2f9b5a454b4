"""Guards of the house: names, docstrings of folders, YAML that parses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_rlhf.cli.main import COMMANDS
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.runtime.command_line import parse_config

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "hybrid_rlhf"
SOURCES = sorted(LIBRARY.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = [ROOT / "train.py", *sorted((ROOT / "training").rglob("*.py")), *sorted((ROOT / "inference").rglob("*.py"))]


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_namespaces_and_no_bare_excepts(path: Path) -> None:
    for function in functions(path):
        names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        assert "args" not in names, f"{function.name} takes a namespace"
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"bare except, line {node.lineno}"


def test_folders_introduce_themselves() -> None:
    for folder in sorted(path.parent for path in LIBRARY.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring and 2 <= len(docstring.splitlines()) <= 12, folder


def test_class_names_are_unique() -> None:
    """Private classes and config items aside, a name means one thing."""
    seen: dict[str, Path] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert seen.setdefault(node.name, path) == path, (node.name, str(path), str(seen[node.name]))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_only_call_a_command(path: Path) -> None:
    """A docstring that says how to start it, the import of a command's main, and the call."""
    docstring, imported, guard = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr) and str(path.relative_to(ROOT)) in path.read_text().splitlines()[0]
    assert isinstance(imported, ast.ImportFrom) and str(imported.module).startswith("hybrid_rlhf.cli.")
    assert ast.unparse(imported).endswith(" import main")
    assert ast.unparse(guard) == "if __name__ == '__main__':\n    main()"


def test_every_command_has_a_module_and_help() -> None:
    commands = LIBRARY / "cli"
    modules = {path for path in commands.rglob("*.py") if any(function.name == "main" for function in functions(path))}
    named = [module for module, _ in COMMANDS.values()]
    assert modules == {commands / f"{module.replace('.', '/')}.py" for module in (*named, "main")}


def test_algorithms_are_short_and_repeat_nothing() -> None:
    """120 lines at most, and no six of them, blank ones aside, stand in two files."""
    seen: dict[tuple[str, ...], str] = {}
    for path in sorted(
        path for name in ("rl/algorithms", "supervised/preference") for path in (LIBRARY / name).glob("*.py")
    ):
        whole = path.read_text().splitlines()
        assert len(whole) <= 120 or path.name in ("objectives.py", "reference.py"), "these two are parts of the loop"
        lines = [line.strip() for line in whole if line.strip()]
        for place in range(len(lines) - 5):
            block = tuple(lines[place : place + 6])
            assert seen.setdefault(block, path.name) == path.name, (path.name, seen[block], block)


def test_every_yaml_belongs_to_a_config() -> None:
    """A new file needs a line here, and parses."""
    types = {"hybrid_rlhf/configs/commands/demo.yaml": PipelineConfig}
    found = [path for folder in ("hybrid_rlhf", "training", "inference") for path in (ROOT / folder).rglob("*.yaml")]
    assert {str(path.relative_to(ROOT)) for path in found} == set(types)
    for name, config_type in types.items():
        assert parse_config(config_type, ["--config", str(ROOT / name)]) != config_type()


def test_the_demo_parses() -> None:
    config = parse_config(PipelineConfig, [], defaults=ROOT / "hybrid_rlhf" / "configs" / "commands" / "demo.yaml")
    assert config.base_model == "embedded"


def test_test_modules_do_not_import_each_other() -> None:
    """What two of them need is in tests/support."""
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in imported:
                assert not re.search(r"(^|\.)(test_\w+|conftest)(\.|$)", name), f"{path}:{node.lineno} imports {name}"


def test_functions_of_tests_have_one_definition() -> None:
    """No body is written twice, and no test module redefines a name of tests/support."""
    bodies: dict[str, str] = {}
    names: dict[str, Path] = {}
    for path in sorted(TESTS, key=lambda path: path.parent.name != "support"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.lower().startswith("test"):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            if path.parent.name == "support":
                assert names.setdefault(node.name, path) == path, where
                assert ast.get_docstring(node) or node.name.startswith("_"), f"{where} needs a docstring"
            else:
                assert node.name.startswith("_") or node.name not in names, f"{where} is in {names[node.name].name}"
            body = ast.unparse([part for part in node.body if not _is_docstring(part)])
            assert bodies.setdefault(body, where) == where, f"{where} repeats {bodies[body]}"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
