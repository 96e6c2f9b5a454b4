"""The wheel as a user without a checkout has it: built, installed into an empty environment, and its demo run there.

Needs a package index and takes minutes: `make wheel-demo` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import hybrid_rlhf
from hybrid_rlhf.models.pretrained.embedded import CACHE, REQUIREMENT
from hybrid_rlhf.runtime.observability.metrics import read_metrics

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).parents[2]
SMALL = "--rl.rollout.prompts_per_step 4 --rl.rollout.sampling.max_new_tokens 8".split()
for _step in ("sft", "reward", "rl"):
    SMALL += f"--{_step}.train.max_steps 2 --{_step}.data.max_eval_rows 4".split()


def run(words: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command outside the checkout, with no path or setting of this environment or of the tests."""
    ours = ("PYTHON", "PYTEST", "VIRTUAL_ENV", "HYBRID_RLHF", "TRITON", "TOKENIZERS", "OMP")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HF_HUB_OFFLINE": "1", **more}
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's home: an empty folder, with an empty cache."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy of the sources: a build folder that an earlier build left in the checkout would get into the wheel.
    source = folder / "source"
    source.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built = run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(source)], folder)
    assert built.returncode == 0, built.stderr[-3000:]
    (file,) = folder.glob("hybrid_rlhf-*.whl")
    return file


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a fresh environment with the wheel and its demo extra."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    installed = run([*pip, f"{wheel}[demo]"], folder)
    assert installed.returncode == 0, installed.stderr[-3000:]
    return folder / "bin"


def test_one_package_and_one_command_are_installed(scripts: Path, home: Path) -> None:
    (information,) = (scripts.parent / "lib").glob("python*/site-packages/hybrid_rlhf-*.dist-info")
    installed = [line.split(",")[0] for line in (information / "RECORD").read_text().splitlines()]
    top = {name.split("/")[0] for name in installed if not name.startswith("../")}
    assert top == {"hybrid_rlhf", information.name}
    assert [name for name in installed if name.startswith("../")] == ["../../../bin/hybrid-rlhf"]
    assert "hybrid_rlhf/configs/commands/demo.yaml" in installed
    assert "hybrid_rlhf/board/static/views/runs.js" in installed
    done = run([str(scripts / "hybrid-rlhf"), "--version"], home)
    assert (done.returncode, done.stdout) == (0, f"hybrid-rlhf {hybrid_rlhf.__version__}\n"), done.stderr


def test_the_demo_without_an_index_names_the_command_to_run(scripts: Path, home: Path) -> None:
    offline = {"HOME": str(home), "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = run([str(scripts / "hybrid-rlhf"), "demo", *SMALL], home, **offline)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{scripts}/python" in done.stderr and f"-m pip install --no-deps {REQUIREMENT}`" in done.stderr


def test_the_demo_runs_to_its_end(scripts: Path, home: Path) -> None:
    done = run([str(scripts / "hybrid-rlhf"), "demo", *SMALL], home, HOME=str(home))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.startswith("== demo: downloading the embedded model")
    assert len([*(home / CACHE.relative_to(Path.home())).iterdir()]) == 1
    assert "Traceback" not in done.stdout + done.stderr and "Warning" not in done.stdout + done.stderr
    for step in ("step1_sft", "step2_reward", "step3_ppo"):
        assert [line["step"] for line in read_metrics(home / "output" / step)] == [0, 1, 2]
    assert "What changed" in done.stdout and " -m hybrid_rlhf chat output/step3_ppo/actor" in done.stdout


def test_the_trained_model_generates(scripts: Path, home: Path) -> None:
    (home / "prompts.jsonl").write_text('{"prompt": "Who are you?"}\n')
    words = ["generate", "output/step3_ppo/actor", "--input", "prompts.jsonl", "--output", "completions.jsonl"]
    done = run([str(scripts / "hybrid-rlhf"), *words, "--sampling.max_new_tokens", "4"], home, HOME=str(home))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads((home / "completions.jsonl").read_text())["completions"]) == 1
