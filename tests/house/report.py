"""Report of the library's structure: `make house` prints it beside the stored one, `--write` stores it.

Sizes are questions, not failures: nothing here ends with an error. A commit that makes a folder larger stores the
table (`tests/house/structure.json`) and so shows the change in its diff. A token is one of Python's `tokenize`, without
comments, docstrings and layout, so that joined statements and reflowed calls gain nothing.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grimp
import networkx

ROOT = Path(__file__).parents[2]
PACKAGE = "hybrid_rlhf"
STORED = Path(__file__).with_name("structure.json")
LARGEST = 10
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def main() -> None:
    """Print the report, and store it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table")
    options = parser.parse_args()
    library = {path.relative_to(ROOT): token_count(path) for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
    now = {"tokens": folder_tokens(library), "circles": circles()}
    stored = json.loads(STORED.read_text())
    print(f"{'tokens of code':<28}{'stored':>10}{'now':>10}{'change':>10}")
    for name in sorted({*now["tokens"], *stored["tokens"]}):
        before = stored["tokens"].get(name, 0)
        after = now["tokens"].get(name, 0)
        print(f"{name:<28}{before:>10,}{after:>10,}{after - before:>+10,}")
    print(f"\ncircles of modules: {len(now['circles'])} (stored: {len(stored['circles'])})")
    for circle in now["circles"]:
        print(f"  {', '.join(circle)}")
    _print_largest("largest files (tokens)", library)
    _print_largest("longest functions (lines)", function_lines(library))
    _print_largest("fullest folders (files)", Counter(path.parent for path in library))
    names = Counter(path.name for path in library if path.name != "__init__.py")
    print(f"\nfile names that occur twice or more: {sum(count > 1 for count in names.values())}")
    if options.write:
        STORED.write_text(json.dumps(now, indent=1) + "\n")


def folder_tokens(library: Mapping[Path, int]) -> Counter[str]:
    """Tokens of each folder of the library, of the whole, and of the tests."""
    tokens = Counter[str]()
    for path, count in library.items():
        if len(path.parts) > 2:
            tokens["/".join(path.parts[:2])] += count
    tokens[PACKAGE] = sum(library.values())
    tokens["tests"] = sum(token_count(path) for path in (ROOT / "tests").rglob("*.py"))
    return tokens


def token_count(path: Path) -> int:
    """Number of tokens of code of a file."""
    source = path.read_bytes()
    docstrings = set(_docstring_positions(ast.parse(source)))
    return sum(
        token.type not in LAYOUT and token.start not in docstrings
        for token in tokenize.tokenize(io.BytesIO(source).readline)
    )


def _docstring_positions(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Line and column of each string that is a statement: docstrings, and those under attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.col_offset


def circles() -> list[list[str]]:
    """Modules that import each other, directly or not; imports for type checkers count."""
    graph = grimp.build_graph(PACKAGE)
    imports = networkx.DiGraph()
    for module in graph.modules:
        imports.add_edges_from((module, imported) for imported in graph.find_modules_directly_imported_by(module))
    return sorted(sorted(part) for part in networkx.strongly_connected_components(imports) if len(part) > 1)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def function_lines(paths: Iterable[Path]) -> dict[str, int]:
    """Number of lines of each function."""
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in paths
        for node in functions(ROOT / path)
    }


def _print_largest(title: str, sizes: Mapping[Any, int]) -> None:
    print(f"\n{title}")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST]:
        print(f"  {size:>6,}  {name}")


if __name__ == "__main__":
    main()
