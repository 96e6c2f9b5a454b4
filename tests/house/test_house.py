"""Rules of the library's structure that fail; sizes are a report (`make house`)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hybrid_rlhf.cli.main import COMMANDS, SUBCOMMANDS
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.runtime.command_line import parse_config
from tests.house.report import functions

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "hybrid_rlhf"
SOURCES = sorted(LIBRARY.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = [ROOT / "train.py", *sorted((ROOT / "training").rglob("*.py")), *sorted((ROOT / "inference").rglob("*.py"))]


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


def test_guides_name_what_exists() -> None:
    """Files and folders in the docstring of a folder are in it, or in the library."""
    for guide in sorted(LIBRARY.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(guide.read_text())) or ""
        for name in re.findall(r"`([\w/]+(?:\.(?:py|cpp|yaml)|/))`", docstring):
            assert (guide.parent / name).exists() or (LIBRARY / name).exists(), f"{guide} names {name}"


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
    groups = [COMMANDS, *SUBCOMMANDS.values()]
    named = {module for group in groups for module, _ in group.values()} - SUBCOMMANDS.keys()
    assert modules == {commands / f"{module.replace('.', '/')}.py" for module in (*named, "main")}


def test_every_yaml_belongs_to_a_config() -> None:
    """A new file needs a line here, and parses."""
    types = {"hybrid_rlhf/configs/commands/demo.yaml": PipelineConfig}
    found = [path for folder in ("hybrid_rlhf", "training", "inference") for path in (ROOT / folder).rglob("*.yaml")]
    found = [path for path in found if path.parent.name != "other_systems"]  # tests/configs/test_other_systems.py
    assert {str(path.relative_to(ROOT)) for path in found} == set(types)
    for name, config_type in types.items():
        assert parse_config(config_type, ["--config", str(ROOT / name)]) != config_type()


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
