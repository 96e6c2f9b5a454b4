"""Commands that refuse their line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def refusal(main: Callable[[list[str]], object], words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of standard error of a command that ends with exit code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error
