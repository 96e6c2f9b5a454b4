"""Hooks of the documentation site: generated pages; links to what the site does not have become their text.

The latter are files outside docs/, and folders. tests/house/test_docs.py checks that they exist; mkdocs checks all
other links.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

import page_of_api  # mkdocs has the folder of its hooks on the path
import page_of_keys
from mkdocs.structure.files import File, Files

GENERATED = {"api.md": page_of_api, "keys.md": page_of_keys}
"""Modules that write the pages that only the site has."""

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)(?:#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """The files of the site with the generated pages."""
    for name, module in GENERATED.items():
        files.append(File.generated(config, name, content=module.page()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """Replace the links of a page to what the site does not have."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        return found[1] if target.startswith("..") or found[2].endswith("/") else found[0]

    return _LINK.sub(replaced, markdown)
