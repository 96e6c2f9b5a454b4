"""Pages that are generated are current, and links between pages lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import hybrid_rlhf

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


def test_the_api_reference_is_current_and_whole() -> None:
    spec = importlib.util.spec_from_file_location("generate_api", ROOT / "docs" / "generate_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text(), "run: python docs/generate_api.py"
    assert {name for names in module.GROUPS.values() for name in names} == set(hybrid_rlhf.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
