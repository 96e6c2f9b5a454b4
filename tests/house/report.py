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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import networkx

ROOT = Path(__file__).parents[2]
PACKAGE = "hybrid_rlhf"
STORED = Path(__file__).with_name("structure.json")
LARGEST = 10
LAYOUT = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
)


def main() -> None:
    """Print the report, and store it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table")
    options = parser.parse_args()
    now = structure()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    print(f"{'tokens of code':<28}{'stored':>10}{'now':>10}{'change':>10}")
    for name in sorted({*now["tokens"], *stored.get("tokens", {})}):
        before = stored.get("tokens", {}).get(name, 0)
        after = now["tokens"].get(name, 0)
        print(f"{name:<28}{before:>10,}{after:>10,}{after - before:>+10,}")
    print(f"\ncircles of modules: {len(now['circles'])} (stored: {len(stored.get('circles', []))})")
    for circle in now["circles"]:
        print(f"  {', '.join(circle)}")
    library = sorted((ROOT / PACKAGE).rglob("*.py"))
    _print_largest("largest files (tokens)", {path.relative_to(ROOT): token_count(path) for path in library})
    _print_largest("longest functions (lines)", dict(functions(library)))
    _print_largest("fullest folders (files)", Counter(path.parent.relative_to(ROOT) for path in library))
    names = Counter(path.name for path in library if path.name != "__init__.py")
    print(f"\nfile names that occur twice or more: {sum(count > 1 for count in names.values())}")
    if options.write:
        STORED.write_text(json.dumps(now, indent=1) + "\n")


def structure() -> dict[str, Any]:
    """Tokens of each folder of the library, of the whole, and of the tests; the circles of modules."""
    library = ROOT / PACKAGE
    folders = sorted(path.parent for path in library.glob("*/__init__.py"))
    tokens = {f"{PACKAGE}/{folder.name}": sum(token_count(path) for path in folder.rglob("*.py")) for folder in folders}
    tokens[PACKAGE] = sum(token_count(path) for path in library.rglob("*.py"))
    tokens["tests"] = sum(token_count(path) for path in (ROOT / "tests").rglob("*.py"))
    return {"tokens": tokens, "circles": circles()}


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


def functions(paths: list[Path]) -> Iterator[tuple[str, int]]:
    """Each function with its number of lines."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def _print_largest(title: str, sizes: dict[Any, int]) -> None:
    print(f"\n{title}")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST]:
        print(f"  {size:>6,}  {name}")


if __name__ == "__main__":
    main()
