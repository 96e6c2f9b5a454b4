"""`hybrid-rlhf env`: what is installed, and what is wrong with it."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch

from hybrid_rlhf.cli.main import main
from hybrid_rlhf.runtime import installation
from hybrid_rlhf.runtime.installation import Fault, PackageState, required_packages

REQUIREMENTS = [
    "torch>=2",
    "numpy<1",
    "there-is-no-such-package>=3",
    'rich>=1; extra == "pretty"',
    'numpy<1; extra == "old"',
    'there-is-no-such-package; extra == "none"',
    'numpy<1; sys_platform == "plan9"',
]


def test_requirements_next_to_what_is_installed() -> None:
    states = required_packages(REQUIREMENTS)
    assert [(s.name, s.required, s.extra) for s in states] == [
        ("torch", ">=2", None),
        ("numpy", "<1", None),
        ("there-is-no-such-package", ">=3", None),
        ("rich", ">=1", "pretty"),
        ("numpy", "<1", "old"),
        ("there-is-no-such-package", "", "none"),
    ], "a package of another platform is not required"
    assert states[0] == PackageState("torch", ">=2", version("torch"))
    faults = [state.fault() for state in states]
    old = Fault(f"numpy<1 is required, {version('numpy')} is installed", "pip install 'numpy<1'")
    gone = Fault(
        "there-is-no-such-package>=3 is required, it is not installed", "pip install 'there-is-no-such-package>=3'"
    )
    assert faults == [None, old, gone, None, old, None], "a missing optional package is no fault"


def test_the_command_prints_versions_and_fails_on_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["env"])
    said = capsys.readouterr().out
    assert f"torch                    {torch.__version__}" in said and "extra serve" in said and "problem" not in said
    main(["env", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__ and found["faults"] == []
    assert found["compiled_cpu_kernels"] in (True, False) and found["processor"]["cores"] >= 1
    assert {"deepspeed", "transformers"} <= {package["name"] for package in found["packages"]}

    monkeypatch.setattr(installation, "required_packages", lambda _: required_packages(REQUIREMENTS))
    for words in (["env"], ["env", "--json"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 1
        said = capsys.readouterr().out
        assert "pip install 'numpy<1'" in said
    assert [fault["fix"] for fault in json.loads(said)["faults"]][0] == "pip install 'numpy<1'"


def test_a_gpu_that_torch_does_not_find_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    found = installation._hidden_gpus({"driver": "570.1"}, [])
    assert found is not None and "built without CUDA" in found.problem
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = installation._hidden_gpus({"driver": "570.1"}, [])
    assert found is not None and found.fix == "unset CUDA_VISIBLE_DEVICES"
    assert installation._hidden_gpus({}, []) is None and installation._hidden_gpus({"driver": "1.0"}, [{}]) is None


def test_an_option_that_the_command_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["env", "--verbose", "true"])
    assert stopped.value.code == 2 and "unknown option --verbose" in capsys.readouterr().err
