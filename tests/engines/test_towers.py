"""Training on text from folders with a tower for images: it stays as it was, and the folder is saved as loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.engines.adapters import AdapterEngine
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.engine import Role
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.models.families import unread_weights
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.models.lora import add_lora, four_bit_layers, lora_layers
from hybrid_rlhf.models.packing import require_tensor_parallelism
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.world import World
from tests.support.engines import PROMPTS, actor_spec, train_generate_save, train_step
from tests.support.errors import user_error
from tests.support.marks import slow
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_tokenizer
from tests.support.towers import PROCESSOR_FILES, TYPES, config_in, save_with_tower, weights_in

TOWERS = {
    "gemma3": "vision_tower.",
    "llava": "vision_tower.",
    "mllama": "vision_model.",
    "qwen2_5_vl": "visual.",
    "qwen3_5": "visual.",
}


def decaying(path: Path, **settings: Any) -> EngineSpec:
    spec = actor_spec(path, **settings)
    assert spec.optimizer is not None
    return replace(spec, optimizer=replace(spec.optimizer, weight_decay=0.1))


def unread_in(engine: Any) -> set[str]:
    return set(unread_weights(engine.lm, [name for name, _ in engine.lm.named_parameters()]))


def save(folder: Path, engine: Any, world: World) -> None:
    save_model(folder, full_tensors(engine.lm, world), lm=engine.lm, tokenizer=tiny_tokenizer(), world=world)


def require_same(ours: dict[str, Any], theirs: dict[str, Any], part: str) -> None:
    names = [name for name in ours if part in name]
    assert len(names) > 5 and all(torch.equal(ours[name], theirs[name]) for name in names)


def require_kept(saved: Path, loaded: Path, tower: str, *, changed: str = "embed_tokens.weight") -> None:
    """The folder is that which was loaded, but for weights of the language model."""
    theirs, ours = weights_in(loaded), weights_in(saved)
    assert ours.keys() == theirs.keys()
    require_same(ours, theirs, tower)
    assert any(changed in name and not torch.equal(ours[name], theirs[name]) for name in ours)
    assert config_in(saved) == config_in(loaded)
    assert all((saved / name).read_text() == content for name, content in PROCESSOR_FILES.items())


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(("stage", "hub_names"), [(0, True), slow(1, False), (2, False), (3, True), slow(3, False)])
def test_the_folder_is_saved_as_it_was_loaded(
    model_type: str, stage: int, hub_names: bool, tmp_path: Path, world: World
) -> None:
    """In every stage: weight decay changed a tower in stages 1 and 2, and stage 3 saved other names."""
    loaded = save_with_tower(tmp_path / "loaded", model_type, hub_names=hub_names)
    engine = build_actor(decaying(loaded, stage=stage), world)
    for _ in range(2):
        train_step(engine, world)
    with engine.inference(stop_token_ids=()) as generation:
        generation.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2))  # a sync fails if log-probs differ
    save(tmp_path / "saved", engine, world)
    require_kept(tmp_path / "saved", loaded, TOWERS[model_type])
    unread = unread_in(engine)
    parameters = dict(engine.lm.named_parameters())
    assert unread and all(parameters[name].requires_grad == (name not in unread) for name in parameters)
    of_text = build_actor(decaying(tmp_path / "saved", stage=stage), world, has_images=False)
    copies = stage == 3 and images_refused(engine.lm.config) is None
    assert (engine._tower is not None) == copies and of_text._tower is None, "a copy is for images"
    with of_text.inference(stop_token_ids=()) as generation:
        generation.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2))


@pytest.mark.parametrize(("model_type", "ranks"), [("qwen3_5", 2), slow("gemma3", 2)])
def test_ranks_generate_train_and_save_it(model_type: str, ranks: int, tmp_path: Path, world: World) -> None:
    """The weight sync of partitions, whose check compares the log-probs of sampler and trainer."""
    loaded = save_with_tower(tmp_path / "loaded", model_type, hub_names=True)
    alone = train_generate_save(world, loaded, tmp_path / "alone", {})
    results = run_ranks(train_generate_save, ranks, tmp_path / "r", loaded, tmp_path / "saved", {"stage": 3})
    assert results[0]["completions"] == alone["completions"] and results[0]["same"]
    require_kept(tmp_path / "saved", loaded, TOWERS[model_type])


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_adapters_are_in_the_language_model_alone(model_type: str, tmp_path: Path, world: World) -> None:
    """All-linear, and short names that modules of the tower have too; merged weights are saved with the tower."""
    loaded = save_with_tower(tmp_path / "loaded", model_type)
    result = train_generate_save(world, loaded, tmp_path / "saved", {"lora": 4, "stage": 2})
    assert result["losses"][2] < result["losses"][0]
    require_kept(tmp_path / "saved", loaded, TOWERS[model_type], changed="q_proj" if model_type == "gemma3" else "proj")
    adapter = load_file(tmp_path / "saved" / "adapter" / "adapter_model.safetensors")
    assert adapter and all(".language_model." in name for name in adapter)


def load(path: Path, architecture: Any = "causal_lm") -> Any:
    return load_model(str(path), architecture, config=ModelConfig(), dtype=torch.float32)[0]


def adapted(path: Path, *targets: str) -> list[str]:
    lm = load(path)
    add_lora(lm, LoraConfig(target_modules=list(targets)), "causal_lm", seed=0)
    return [name for name, _ in lora_layers(lm)]


def test_what_adapts_or_quantises_every_layer_leaves_the_tower_out(tmp_path: Path, world: World) -> None:
    """4 bits, and the adapters of many tenants on one base. Tensor parallelism is refused: DeepSpeed finds no plan in
    the config of the whole, and would leave head norms of Gemma 3 without their sum."""
    lm = load(save_with_tower(tmp_path, "gemma3"))
    with user_error("is for models of text alone, Gemma3ForConditionalGeneration has towers: set it to 1"):
        require_tensor_parallelism(lm, 2)
    names = four_bit_layers(lm, "causal_lm")
    assert names and all(name.startswith("model.language_model.") for name in names)
    engine = AdapterEngine(lm, world=world)
    engine.add("short", LoraConfig(target_modules=["q_proj"]), seed=0)
    with user_error("must name linear layers of Gemma3ForConditionalGeneration except the head, got fc1"):
        engine.add("tower", LoraConfig(target_modules=["q_proj", "fc1"]), seed=0)
    engine.save("short", tmp_path / "adapter")
    assert all(".language_model." in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_names_of_target_modules_select_layers_of_the_language_model(tmp_path: Path) -> None:
    """`q_proj` is also a layer of the tower; one that is named by its whole name cannot learn from text."""
    loaded = save_with_tower(tmp_path, "gemma3")
    assert adapted(loaded, "q_proj") == [f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    with user_error("no module of the language model of Gemma3ForConditionalGeneration is named vision_tower"):
        adapted(loaded, "q_proj", "vision_tower.encoder.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("role", ["reward", "critic"])
@pytest.mark.parametrize(
    ("model_type", "stage"),
    [("gemma3", 0), ("qwen3_5", 2), ("gemma3", 3), ("llava", 0), slow("qwen2_5_vl", 3), slow("qwen3_5", 3)],
)
def test_scorers_keep_the_tower(model_type: str, stage: int, role: Role, tmp_path: Path, world: World) -> None:
    """A reward model or critic of a causal LM's folder has a score in place of the head."""
    loaded = save_with_tower(tmp_path / "loaded", model_type, hub_names=True)
    engine = build_engine(replace(decaying(loaded, stage=stage), role=role), world)
    ids = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    engine.backward((engine(ids, mask) - 1.0).square().sum(), count=16)
    engine.step()
    save(tmp_path / "saved", engine, world)
    theirs, ours = weights_in(loaded), weights_in(tmp_path / "saved")
    assert ours.keys() - theirs.keys() == {"score.weight"}
    assert all(name.endswith("lm_head.weight") for name in theirs.keys() - ours.keys())
    require_same(ours, theirs, TOWERS[model_type])
    assert config_in(tmp_path / "saved")["vision_config"] == config_in(loaded)["vision_config"]
    assert (tmp_path / "saved" / "processor_config.json").read_text() == PROCESSOR_FILES["processor_config.json"]
    build_engine(replace(decaying(tmp_path / "saved", stage=stage), role=role), world)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")


def test_muon_leaves_layers_for_images_alone(tmp_path: Path, world: World) -> None:
    """Those that are between the layers of the language model (Mllama)."""
    loaded = save_with_tower(tmp_path / "loaded", "mllama")
    engine = build_actor(decaying(loaded, stage=2, optimizer="muon"), world)
    train_step(engine, world)
    save(tmp_path / "saved", engine, world)
    require_kept(tmp_path / "saved", loaded, "cross_attn", changed="layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("model_type", "architecture", "message"),
    [
        ("paligemma", "causal_lm", "must be of a type that docs/models.md lists, got paligemma: give its language"),
        ("mllama", "scorer", "needs a classifier of transformers, mllama has none: give its language model alone"),
    ],
)
def test_what_would_lose_its_tower_is_refused(model_type: str, architecture: Any, message: str, tmp_path: Path) -> None:
    """A class for text alone, or one that computes text otherwise, would save another model."""
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with user_error(message):
        load(tmp_path, architecture)
