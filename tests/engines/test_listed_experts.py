"""A mixture whose experts are modules of their own, as models with remote code have them, under ZeRO-3: ranks whose
tokens go to different experts must gather the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from hybrid_rlhf.engines.builder import build_engine
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec, train_step
from tests.support.errors import refused
from tests.support.marks import slow
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_config

EXPERTS = 8
UPDATES = 3


class ListedMixture(nn.Module):
    """Each token passes through one expert of a list; an expert without tokens is not called."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(config.hidden_size, 24), nn.SiLU(), nn.Linear(24, config.hidden_size))
            for _ in range(EXPERTS)
        )
        self.called: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            self.called.add(index)
            out = out + self.experts[index](x * (chosen == index)[..., None]) * (weights * (chosen == index))[..., None]
        return out


def use_listed_mixture() -> None:
    """For this process."""
    modeling_qwen2.Qwen2MLP = ListedMixture


def train(world: World, folder: Path, stage: int, dtype: str) -> dict[str, Any]:
    """Losses and norms of some updates, and the experts that this rank's tokens went to."""
    use_listed_mixture()
    everything = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    spec = replace(actor_spec(folder, stage=stage, dtype=dtype), deepspeed_overrides=everything if stage == 3 else {})
    engine = build_engine(spec, world)
    losses, norms = [], []
    for _ in range(UPDATES):
        losses.append(train_step(engine, world))
        norms.append(float(engine.deepspeed_engine.get_global_grad_norm()))
    called = [m.called for m in engine.module.modules() if isinstance(m, ListedMixture)]
    return {"losses": losses, "norms": norms, "called": called}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(modeling_qwen2, "Qwen2MLP", ListedMixture)
    settings = {key: value for key, value in tiny_config().to_dict().items() if key not in ("model_type", "head_dim")}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**settings)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("stage", "dtype", "apart"), [(0, "float32", 1e-4), (0, "bfloat16", 1e-2), slow(3, "float32", 1e-4)]
)
def test_ranks_that_route_to_different_experts_train_together(
    stage: int, dtype: str, apart: float, model: Path, tmp_path: Path
) -> None:
    """Also the norm: bfloat16's optimizer leaves out weights without a gradient on its rank."""
    expected = run_ranks(train, 1, tmp_path / "one", model, 0, dtype)[0]
    found = run_ranks(train, 2, tmp_path / "two", model, stage, dtype)
    assert found[0]["called"] != found[1]["called"], "or the test proves nothing"
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=apart)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=apart)
        assert rank["norms"] == pytest.approx(found[0]["norms"], rel=1e-6)


def refusal(world: World, folder: Path, stage: int) -> str:
    """The error that a rank raises."""
    use_listed_mixture()
    return refused(build_engine, actor_spec(folder, stage=stage), world)


def test_stages_that_would_mix_up_their_gradients_are_refused(model: Path, tmp_path: Path) -> None:
    for line in run_ranks(refusal, 2, tmp_path / "two", model, 2):
        assert line.startswith("zero.stage 2 on several ranks needs experts in one weight, Qwen2ForCausalLM has")
