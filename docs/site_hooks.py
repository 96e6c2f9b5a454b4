"""Hook of the documentation site: a link to what the site does not have becomes its text.

These are files outside docs/, and folders. tests/house/test_docs.py checks that they exist; mkdocs checks all other
links.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """Replace the links of a page to what the site does not have."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        return found[1] if target.startswith("..") or found[2].endswith("/") else found[0]

    return _LINK.sub(replaced, markdown)
