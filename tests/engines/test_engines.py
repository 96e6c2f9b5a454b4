"""Engines over ranks and ZeRO stages: gradients, weight sync, saving, averages."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig
from hybrid_rlhf.engines import builder
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.builder import _adamw, build_actor, build_engine
from hybrid_rlhf.engines.engine import EngineFacts, Role
from hybrid_rlhf.engines.learning_rates import lr_factor
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.engines.role_model import AbsentEngine
from hybrid_rlhf.runtime.world import World, close_world, init_world
from tests.support.engines import PROMPTS, actor_spec, train_generate_save, train_step
from tests.support.errors import user_error
from tests.support.marks import faults
from tests.support.model_types import tiny_of_type
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_model


def greedy(model: Any) -> list[int]:
    """What a Hugging Face model completes the first prompt with."""
    ids = torch.tensor([PROMPTS[0]])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, 3:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_lora_generates_merged_and_saves_merged(ranks: int, stage: int, model_folder: Path, tmp_path: Path) -> None:
    results = run_ranks(
        train_generate_save, ranks, tmp_path / "r", model_folder, tmp_path / "m", {"stage": stage, "lora": 4, "lr": 0.1}
    )
    assert results[0]["losses"][2] < results[0]["losses"][0]
    for rank, result in enumerate(results):
        assert result["same"], "generation leaves the training weights unchanged bit for bit"
        assert result["released"], "and releases the gathered ones"
        assert result["completions"] == results[0]["completions"][rank:]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = torch.tensor([PROMPTS[0]])
    assert greedy(saved) == results[0]["completions"][0]
    base = load_file(model_folder / "model.safetensors")
    merged = load_file(tmp_path / "m" / "model.safetensors")
    assert merged.keys() == base.keys()
    assert not torch.equal(merged["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "m" / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, saved(ids).logits, msg="the saved adapter is the one merged")
    assert adapted.peft_config["default"].base_model_name_or_path == str(model_folder)


def fresh_head(world: World, path: Path, stage: int, role: Role) -> torch.Tensor:
    engine = build_engine(replace(actor_spec(path, stage=stage), role=role), world)
    (head,) = (tensor.clone() for name, tensor in full_tensors(engine.lm, world) if name == "score.weight")
    return head.flatten()


def test_a_fresh_score_head_is_the_same_however_the_model_is_loaded(model_folder: Path, world: World) -> None:
    plain = fresh_head(world, model_folder, 0, "reward")
    assert torch.equal(fresh_head(world, model_folder, 3, "reward"), plain)
    assert plain.std().item() == pytest.approx(1 / math.sqrt(33), rel=0.4), "N details, no. 8"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_fresh_value_head_is_zero(stage: int, model_folder: Path, world: World) -> None:
    assert fresh_head(world, model_folder, stage, "critic").tolist() == [0.0] * 32


def averaged(world: World, path: Path, stage: int) -> tuple[float, float, bool]:
    engine = build_actor(actor_spec(path, stage=stage), world)
    average = WeightAverage(engine.module, decay=0.5)
    values = [_norm_weight(engine, world)]
    for _ in range(3):
        train_step(engine, world)
        average.update()
        values.append(_norm_weight(engine, world))
    with average.applied():
        found = _norm_weight(engine, world)
    recurrence = values[0]
    for value in values[1:]:
        recurrence = 0.5 * recurrence + 0.5 * value
    return found, recurrence, _norm_weight(engine, world) == values[-1]


def _norm_weight(engine: Any, world: World) -> float:
    tensors = dict(full_tensors(engine.lm, world))
    return float(tensors["model.norm.weight"][3]) if world.is_main else 0.0


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 3), faults(2, 3)])
def test_the_average_is_the_recurrence_and_leaves_the_weights(
    ranks: int, stage: int, model_folder: Path, tmp_path: Path
) -> None:
    found, recurrence, untouched = run_ranks(averaged, ranks, tmp_path, model_folder, stage)[0]
    assert found == pytest.approx(recurrence, abs=1e-6)
    assert untouched


def test_deepspeed_imports_no_mlflow() -> None:
    from deepspeed.autotuning import autotuner

    assert not autotuner.has_mlflow


def test_adam_adds_eps_after_the_bias_correction() -> None:
    """As torch; TensorFlow's Adam adds it before, which for the first step is eps / sqrt(1 - beta2)."""
    layer = torch.nn.Linear(1, 3, bias=False, dtype=torch.float64)
    before = layer.weight.detach().clone()
    layer.weight.grad = gradient = torch.tensor([[1e-4], [-1e-3], [0.5]], dtype=torch.float64)
    _adamw(layer, OptimizerConfig(eps=1e-3, betas=(0.9, 0.95)), 0.1).step()
    torch.testing.assert_close(before - layer.weight.detach(), 0.1 * gradient / (gradient.abs() + 1e-3))


@pytest.mark.parametrize(
    ("role", "learning", "lora", "lr", "expected", "line"),
    [
        ("actor", None, 0, None, 1.3e-4, "actor: lr 0.00013: derived from width 32 (docs/defaults.md)"),
        ("actor", "sft", 0, None, 2.6e-3, "sft: lr 0.0026: derived from width 32 (docs/defaults.md)"),
        ("critic", None, 4, None, 1.3e-2, "critic: lr 0.013: derived from width 32 and adapters of alpha 16 (docs/"),
        ("actor", None, 0, 3e-5, 3e-5, None),
        ("actor", None, 0, 0.0, 0.0, None),
    ],
)
def test_an_optimizer_without_a_rate_takes_the_one_of_the_models_width(
    role: Role,
    learning: Any,
    lora: int,
    lr: float | None,
    expected: float,
    line: str | None,
    model_folder: Path,
    world: World,
    log_lines: list[str],
) -> None:
    """Once for each role, with its source; a rate that the user gives is used as it is."""
    optimizer = OptimizerConfig(lr=lr, schedule="constant", warmup_fraction=0.0)
    spec = replace(actor_spec(model_folder, lora=lora), role=role, learning=learning, optimizer=optimizer)
    engine = build_engine(spec, world)
    assert engine.deepspeed_engine.optimizer.param_groups[0]["lr"] == expected
    said = [text for text in log_lines if "derived" in text]
    assert len(said) == (line is not None) and all(text.startswith(str(line)) for text in said)


def test_an_engine_is_built_without_a_word_on_the_screen(
    model_folder: Path, world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's optimizer for bfloat16 prints the memory in use, a dozen lines for each model."""
    build_engine(actor_spec(model_folder), world)
    capfd.readouterr()  # of the linker, which the first engine of a process asks for libraries
    build_engine(actor_spec(model_folder, dtype="bfloat16"), world)
    assert capfd.readouterr() == ("", "")


def test_a_model_without_a_width_needs_a_rate() -> None:
    """A config of remote code may name its hidden size otherwise."""
    spec, lm = actor_spec(Path("model")), tiny_model()
    lm.config.get_text_config = SimpleNamespace  # type: ignore[assignment]
    with user_error("follows from hidden_size, LlamaForCausalLM has none: set optimizer.lr"):
        builder.learning_rate(spec, lm, OptimizerConfig(), is_main=True)


def test_schedules_rise_and_fall() -> None:
    def factors(schedule: str, warmup: float) -> list[float]:
        config = OptimizerConfig(schedule=schedule, warmup_fraction=warmup)  # type: ignore[arg-type]
        return [lr_factor(step, config=config, total_steps=10) for step in range(11)]

    assert factors("constant", 0.2) == [0.5] + [1.0] * 10
    assert factors("linear", 0.0) == pytest.approx([1 - step / 10 for step in range(11)])
    cosine = factors("cosine", 0.2)
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine[6] == pytest.approx(0.5) and cosine[10] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("model_type", "role", "attention", "line"),
    [
        ("bloom", "actor", "auto", "actor: BloomForCausalLM trains on padded rows: model type bloom is not known to"),
        ("llama", "actor", "eager", "actor: LlamaForCausalLM trains on padded rows: eager attention does not separate"),
        ("llama", "actor", "auto", None),
        ("bloom", "reference", "auto", None),
    ],
)
def test_a_role_that_trains_on_padded_rows_says_why(
    model_type: str,
    role: Role,
    attention: Any,
    line: str | None,
    tmp_path: Path,
    world: World,
    log_lines: list[str],
) -> None:
    """In one line; frozen roles and models that pack say nothing."""
    tiny_of_type(model_type).save_pretrained(tmp_path)
    optimizer = None if role == "reference" else OptimizerConfig()
    model = ModelConfig(dtype="float32", attention=attention)
    spec = replace(actor_spec(tmp_path), role=role, model=model, optimizer=optimizer)
    build_engine(spec, world)
    said = [text for text in log_lines if "padded rows" in text]
    assert len(said) == (line is not None) and all(text.startswith(str(line)) for text in said)


def twice(world: World, path: Path) -> list[float]:
    """The same update in a world, and in the next one of this process."""
    losses = [train_step(build_engine(actor_spec(path, stage=2), world), world)]
    close_world()
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        del os.environ[name]
    alone = init_world()
    return [*losses, train_step(build_engine(actor_spec(path, stage=2), alone), alone)]


def test_a_process_can_train_in_one_world_after_another(tmp_path: Path, model_folder: Path) -> None:
    first, second = run_ranks(twice, 1, tmp_path, model_folder)[0]
    assert first == second


def test_a_rank_without_the_model_reads_nothing_and_refuses_to_compute() -> None:
    elsewhere = World(-1, 2, 2, 3, torch.device("cpu"), ranks=(0, 1))
    absent = AbsentEngine("critic", elsewhere, EngineFacts(packs=False))
    assert not absent.packs and absent.weight_version == 0
    absent.note_version(3)
    with absent.on_device(), absent.reference() as base:
        assert base is absent and absent.weight_version == 3
    for compute in (absent, absent.step, lambda: absent.lm, lambda: absent.module, lambda: absent.config):
        with pytest.raises(RuntimeError, match=r"only ranks \[0, 1\] have the critic"):
            compute()
