"""Hook of the documentation site: a link to a file outside docs/, which the site does not have, becomes its text.

tests/house/test_docs.py checks that those files exist; mkdocs checks all other links.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """Replace the links of a page that leave the folder."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        return found[1] if target.startswith("..") else found[0]

    return _LINK.sub(replaced, markdown)
