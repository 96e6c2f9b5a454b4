"""What of a model folder is read, and what never is."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.models.pretrained.folders import load_config, warn_of_remote_code
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.files.folder_lock import LOCK_FILE
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import refused
from tests.support.runs import run_python

CPU = torch.device("cpu")


class Trap:
    """A pickle of it writes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.file), "w")


def test_pickles_and_code_beside_safetensors_are_not_read(model_folder: Path, tmp_path: Path) -> None:
    folder, sprung = tmp_path / "m", tmp_path / "sprung"
    shutil.copytree(model_folder, folder)
    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt", "scheduler.pth", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    for name in ("modeling_llama.py", "tokenization_llama.py"):
        (folder / name).write_text(f"open({str(sprung)!r}, 'w')\n")
    path = resolve_model(str(folder), world=solo_world(CPU))
    load_tokenizer(path)
    load_model(path, "causal_lm", config=ModelConfig(), dtype=torch.float32)
    load_model(path, "scorer", config=ModelConfig(), dtype=torch.float32)
    GenerationEngine.from_pretrained(path, dtype=torch.float32)
    assert not sprung.exists()
    pickle.loads((folder / "training_args.bin").read_bytes()).close()
    assert sprung.exists(), "the trap works"


def test_trust_is_said_in_red_by_the_main_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    warn_of_remote_code(False, solo_world(CPU))
    warn_of_remote_code(True, World(1, 2, 1, 2, CPU, None))
    assert capsys.readouterr().err == ""
    warn_of_remote_code(True, solo_world(CPU))
    said = capsys.readouterr().err
    assert "\x1b[1;31mtrust_remote_code is true: Python code of the model runs" in said


def test_a_name_is_no_folder_and_no_hub_answers() -> None:
    """The client tries a closed port, of which one line is said; as in other tests, it may also be offline."""
    error = "a model must be a folder or a hub name, nosuch is no folder and the hub is not reachable: check the path"
    assert refused(load_config, "nosuch") == error
    program = """
from huggingface_hub.utils import _http
_http.time.sleep = lambda seconds: None
from hybrid_rlhf.runtime.command_line import user_errors
from hybrid_rlhf.models.pretrained.folders import load_config
with user_errors():
    load_config("nosuch")
"""
    ended = run_python(["-c", program], HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert ended.stderr == f"nosuch is no folder, and the hub does not answer: trying again\nerror: {error}\n"
    assert ended.returncode == 2


def test_a_folder_of_models_names_the_first(model_folder: Path, tmp_path: Path) -> None:
    for role in ("critic", "actor"):
        shutil.copytree(model_folder, tmp_path / "ppo" / role)
    assert refused(resolve_model, str(tmp_path / "ppo"), world=solo_world(CPU)) == (
        f"a model folder must have a config.json, {tmp_path}/ppo has none: give {tmp_path}/ppo/actor"
    )


def test_a_run_that_has_saved_no_model_is_named_as_such(tmp_path: Path) -> None:
    """Its folder is there, so that the name looks right."""
    (tmp_path / LOCK_FILE).touch()
    error = (
        f"a model folder must have a config.json, {tmp_path} has none: give a run that is finished, or finish this one"
    )
    assert refused(resolve_model, str(tmp_path), world=solo_world(CPU)) == error


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    message = refused(resolve_model, str(tmp_path), world=solo_world(CPU))
    assert f"hybrid-rlhf export BASE --adapter {tmp_path} --output FOLDER, and give that" in message
