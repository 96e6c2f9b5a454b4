"""`hybrid-rlhf env`: what is installed, and what is wrong with it."""

from __future__ import annotations

import logging
import re
import shutil
import sysconfig
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli.machine import env
from hybrid_rlhf.runtime import installation
from hybrid_rlhf.runtime.installation import Fault, PackageState, required_packages
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.run import _log_device
from hybrid_rlhf.runtime.sandbox import local
from hybrid_rlhf.runtime.sandbox.local import Isolation, LocalSandbox
from hybrid_rlhf.runtime.sandbox.process import SandboxResult
from hybrid_rlhf.runtime.world import solo_world
from tests.support.commands import CommandLine

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


def test_the_isolation_of_programs_is_told_with_the_reason_why_it_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a run, on the machine that will run it."""
    monkeypatch.setattr(local, "warn_once", lambda text: None)
    monkeypatch.setattr(local, "_candidates", lambda: [Isolation.NAMESPACES, Isolation.OTHER_USER])
    failed = SandboxResult(1, "", "denied")
    results = {Isolation.NAMESPACES: failed, Isolation.OTHER_USER: replace(failed, exit_status=0)}
    monkeypatch.setattr(LocalSandbox, "_run", lambda self, isolation, *rest: results.get(isolation))
    found = env._sandbox()
    assert found["isolation"] == "other_user" and "it has the network" in found["absent"]
    assert found["failures"] == ["namespaces: exit status 1: denied"]
    results |= dict.fromkeys((Isolation.OTHER_USER, Isolation.LIMITS), failed)
    found = env._sandbox()
    assert found["isolation"] is None and "must run" in found["failures"][0]


def test_the_command_prints_versions_and_fails_on_a_fault(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    said = cli("env").out
    shown = (
        "runs compute on          ",
        f"torch                    {torch.__version__}",
        "extra serve",
        "sandbox of programs",
    )
    assert all(text in said for text in shown) and "problem" not in said
    found = cli("env --json").result
    assert found["versions"]["torch"] == torch.__version__ and found["faults"] == []
    assert found["compiled_cpu_kernels"] in (True, False) and found["processor"]["cores"] >= 1
    assert {"deepspeed", "transformers"} <= {package["name"] for package in found["packages"]}

    monkeypatch.setattr(installation, "required_packages", lambda _: required_packages(REQUIREMENTS))
    told, ended = cli("env"), cli("env --json")
    assert told.code == ended.code == 1 and "pip install 'numpy<1'" in told.out
    assert ended.result["faults"][0]["fix"] == "pip install 'numpy<1'"


@pytest.fixture
def devices_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in the place of /dev and of the driver's version; there is no GPU, and no nvidia-smi."""
    monkeypatch.setattr(installation, "_DEVICES", tmp_path)
    monkeypatch.setattr(installation, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:18:23 UTC 2025"


def test_the_reason_why_torch_does_not_find_a_gpu(devices_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.missing_gpu() is None

    def reason(cuda: str | None) -> str:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = installation.missing_gpu()
        assert found is not None
        return f"{found.problem}: {found.fix}"

    (devices_folder / "nvidia0").touch()
    assert "this machine has an NVIDIA device, torch" in reason(None) and "built without CUDA" in reason(None)
    assert "finds no GPU with driver unknown" in reason("13.0")
    (devices_folder / "version").write_text(DRIVER)
    assert "(CUDA 13.0) needs driver 580 or newer, this machine has 570.124.06" in reason("13.0")
    assert "finds no GPU with driver 570.124.06" in reason("12.8")
    (devices_folder / "nvidia0").unlink()
    assert "/dev/nvidia* is missing: give the container its GPUs" in reason("12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset CUDA_VISIBLE_DEVICES" in reason("12.8")
    (devices_folder / "version").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/lib/wsl/lib/nvidia-smi" if name == "nvidia-smi" else None)
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in reason("12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert installation.missing_gpu() is None


def test_what_triton_lacks_to_compile_kernels(devices_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation._triton_faults() == [], "without a GPU nothing is compiled"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(devices_folder)})
    monkeypatch.delenv("CC", raising=False)
    compiler, header = installation._triton_faults()
    assert compiler.problem == "Triton needs a C compiler, PATH has none" and "gcc" in compiler.fix
    assert "Python.h is missing" in header.problem and re.search(r"python3\.\d+-dev", header.fix)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (devices_folder / "Python.h").touch()
    assert installation._triton_faults() == []


def test_a_run_says_what_it_computes_on(
    devices_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that was too old let a run go on on the CPU without a word."""
    world = solo_world(torch.device("cpu"))
    with caplog.at_level(logging.INFO, logger=logger.name):
        _log_device(world)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert caplog.text.count("device: CPU, ") == 1 and "this machine has no NVIDIA device" in caplog.text
        caplog.clear()
        (devices_folder / "nvidia0").touch()
        monkeypatch.setattr(torch.version, "cuda", None)
        _log_device(world)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "this machine has an NVIDIA device" in caplog.records[0].message
    assert "built without CUDA: install the build for CUDA" in caplog.records[1].message
