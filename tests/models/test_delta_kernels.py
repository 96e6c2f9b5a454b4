"""Kernels of the gated delta rule, which transformers takes where it can import fla: not on a CPU, nor in plans."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.engines import builder
from hybrid_rlhf.models.pretrained import loading
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.planning.shapes import BatchShape, shaped_model
from hybrid_rlhf.runtime.observability.logs import logger, warn_once
from hybrid_rlhf.runtime.world import World
from tests.support.model_types import tiny_of_type
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_model

FLA = """
def chunk_gated_delta_rule(*given, **named):
    raise RuntimeError("0 active drivers ([]). There should only be one.")

fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""
"""As fla-core on a machine without a GPU."""
CONFIG = ModelConfig()


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model beside a package fla."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_of_type(request.param).save_pretrained(folder / "model")
    rules = folder / "packages" / "fla" / "ops" / "gated_delta_rule"
    rules.mkdir(parents=True)
    for package in (rules, rules.parent, rules.parent.parent):
        (package / "__init__.py").write_text(FLA if package is rules else "")
    return folder


def logits_and_gradient(folder: Path) -> list[torch.Tensor]:
    lm, _ = load_model(str(folder / "model"), "causal_lm", config=CONFIG, dtype=torch.float32)
    logits = lm(torch.arange(3, 12)[None]).logits
    logits.square().sum().backward()
    weight = next(value for name, value in lm.named_parameters() if name.endswith("A_log"))
    return [logits.detach(), weight.grad]


def planned_bytes(folder: Path) -> float:
    path = str(folder / "model")
    model = shaped_model(path, "causal_lm", config=CONFIG, dtype=torch.float32, lora=None, learns=True)
    return model.measure(BatchShape(2, 64, 128), backward=True).peak


def beside_fla(world: World, folder: Path, on_gpu: bool) -> Any:
    """What a process computes in which fla can be imported."""
    sys.path.insert(0, str(folder / "packages"))
    if not on_gpu:
        return logits_and_gradient(folder)
    loading._use_torch_on_cpu = lambda: None
    planned = planned_bytes(folder)
    lm, _ = load_model(str(folder / "model"), "causal_lm", config=CONFIG, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        lm(torch.arange(3, 12)[None])
    return planned


def test_a_cpu_computes_without_fla(folder: Path, tmp_path: Path) -> None:
    """A forward of these models failed as soon as fla was installed."""
    (found,) = run_ranks(beside_fla, 1, tmp_path, folder, False)
    assert all(map(torch.equal, found, logits_and_gradient(folder)))


def test_a_plan_runs_no_kernel(folder: Path, tmp_path: Path) -> None:
    """On a machine with a GPU the kernels would get tensors without memory; the model itself takes them."""
    (planned,) = run_ranks(beside_fla, 1, tmp_path, folder, True)
    assert planned == planned_bytes(folder)


def test_training_without_kernels_is_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lm, _ = load_model(str(folder / "model"), "causal_lm", config=CONFIG, dtype=torch.float32)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=logger.name):
        for device, trained in (("cpu", lm), ("cuda", tiny_model()), ("cuda", lm), ("cuda", lm)):
            builder._log_work("critic", trained, torch.device(device))
    (record,) = caplog.records
    assert "pip install 'hybrid_rlhf[fla]'" in record.getMessage()
