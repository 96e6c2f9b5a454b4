"""`hybrid-rlhf push` against a server that answers as the hub does, by the hub's own client."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import CommandLine
from tests.support.runs import run_python
from tests.support.servers import json_server


class Hub:
    """Answers the requests of an upload, and keeps what it is sent."""

    def __init__(self, refusal: int | None = None) -> None:
        self.refusal = refusal
        self.created: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.message = ""

    def __call__(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if self.refusal is not None:
            return self.refusal, {"error": "not with this token"}
        if path == "/api/repos/create":
            self.created = json.loads(body)
            return 200, {"url": "https://huggingface.co/me/model", "name": "me/model", "id": "1"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/models/me/model/preupload/main":
            named = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in named]}
        assert (method, path) == ("POST", "/api/models/me/model/commit/main"), path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            else:
                self.message = line["value"]["summary"]
        return 200, {"commitUrl": "https://huggingface.co/me/model/commit/1", "commitOid": "1" * 40}


@pytest.fixture
def run_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model in a run's folder, with a card."""
    folder = tmp_path / "run"
    shutil.copytree(model_folder, folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    (folder / "config.yaml").write_text("output_dir: /home/me/secret\n")
    (folder / "checkpoints" / "step_1").mkdir(parents=True)
    (folder / "checkpoints" / "step_1" / "state.safetensors").write_text("not for others")
    return folder


def pushed(url: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a token."""
    settings = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    return run_python(["-m", "hybrid_rlhf", "push", *words], **{**settings, **environment})


def test_the_files_of_the_model_and_its_card_are_uploaded_and_no_others(run_folder: Path) -> None:
    hub = Hub()
    with json_server(hub) as url:
        done = pushed(url, str(run_folder), "me/model", "--private", "true", "--message", "First")
    assert done.returncode == 0, done.stderr
    assert hub.created["name"] == "model" and hub.created["organization"] == "me"
    assert "private" in (hub.created.get("visibility"), "private" if hub.created.get("private") else None)
    assert hub.message == "First" and "https://huggingface.co/me/model/commit/1" in done.stdout
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    assert not [name for name in hub.files if "checkpoint" in name or name == "config.yaml"]
    assert all((run_folder / name).read_bytes() == content for name, content in hub.files.items())


def test_what_the_hub_refuses_and_what_is_missing_is_one_line(run_folder: Path, tmp_path: Path) -> None:
    with json_server(Hub(refusal=403)) as url:
        for settings, part in (
            ({}, "error: the hub refuses me/model with status 403"),
            ({"HF_HUB_OFFLINE": "1"}, "error: push needs the hub, HF_HUB_OFFLINE is set: unset it"),
            (
                {"HF_TOKEN": "", "HF_HOME": str(tmp_path / "home")},
                "error: push needs a token of the hub, got none: log in with `hf auth login`",
            ),
        ):
            done = pushed(url, str(run_folder), "me/model", **settings)
            assert done.returncode == 2 and done.stderr.startswith(part) and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("", "a model must be named"),
        ("{}", "a repository is USER/NAME, got none"),
        ("{} me/name", "a model folder must have weights"),
    ],
)
def test_mistakes_are_one_line(line: str, rule: str, tmp_path: Path, cli: CommandLine) -> None:
    assert rule in cli.refused(f"push {line.format(tmp_path)}")
