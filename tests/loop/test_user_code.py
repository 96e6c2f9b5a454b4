"""Functions and classes of a user's file."""

from __future__ import annotations

from pathlib import Path

from hybrid_rlhf.loop.user_code import import_named


def test_names_of_one_file_share_its_variables_until_it_changes(tmp_path: Path) -> None:
    """The file was executed once per imported name, so a model that it loads was in memory several times."""
    file = tmp_path / "rewards.py"
    file.write_text("seen = []\ndef first(x): seen.append(x)\ndef second(): return seen\n")
    import_named(f"{file}:first", what="function")(1)
    assert import_named(f"{file}:second", what="function")() == [1]
    file.write_text("def second(): return 'changed'\n")
    assert import_named(f"{file}:second", what="function")() == "changed"
