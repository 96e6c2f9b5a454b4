"""Training on rows of which some have images, on ranks and in ZeRO stages, with a frozen and a trained tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.models.families import unread_weights
from hybrid_rlhf.models.lora import choose_trained
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.processors import ImageProcessor
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.models.vision import Images
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec
from tests.support.errors import user_error
from tests.support.marks import slow
from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_model
from tests.support.towers import weights_in
from tests.support.vision import build_vision, padded_chats, picture, save_vision, vision_processor

CHATS = [
    ([picture(1), "What colour?"], "red"),
    (["no image"], "none at all"),
    (["Hi ", picture(3), " and ", picture(4)], "no"),
    (["nor here"], "is one"),
]
"""Of two ranks one has all images, the other none."""


TRAINED = ("gemma3", "llava", "qwen3_vl")
Batch = tuple[Tensor, Tensor, Images]


def batch_of(family: str) -> Batch:
    """The rows with a blank image."""
    ids, real, images = padded_chats(family, CHATS)
    return ids, real, replace(images, blank=vision_processor(family).blank())


def train(world: World, path: Path, batch: Batch, vision: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Three updates with weight decay, in the last of which no rank has an image; micro-batches of one row."""
    torch.set_num_threads(1)
    spec = actor_spec(path, **settings)
    assert spec.optimizer is not None
    spec = replace(spec, optimizer=replace(spec.optimizer, weight_decay=0.1), model=replace(spec.model, vision=vision))
    engine = build_actor(spec, world)
    ids, real, images = batch
    losses, norms = [], []
    for step in range(3):
        rows = range(4) if step < 2 else (1, 3)
        total = 0.0
        for row in list(rows)[world.rank :: world.size]:
            one = slice(row, row + 1)
            logprobs, _ = engine(ids[one], real[one], real[one], images=replace(images, rows=images.rows[one]))
            mask = real[one] & (logprobs > -1e20)  # not the placeholders
            loss = sft_loss(torch.where(mask, logprobs, 0.0), mask=mask)
            engine.backward(loss.total, count=100)
            total += float(loss.total.detach())
        norms.append(float(engine.step().grad_norm))
        losses.append(float(world.all_reduce(torch.tensor(total))))
    weights = {name: x.clone() for name, x in full_tensors(engine.lm, world) if x is not None}
    return {"losses": losses, "norms": norms, "weights": weights}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of models with gradients of a usual size."""
    return {
        family: save_vision(tmp_path_factory.mktemp(family), family, build_vision(family, spread=2.0))
        for family in TRAINED
    }


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], world: World) -> dict[tuple[str, str], dict[str, Any]]:
    """On one rank without ZeRO."""
    cases = [(family, vision) for family in folders for vision in ("freeze", "train")]
    return {case: train(world, folders[case[0]], batch_of(case[0]), case[1], {"stage": 0}) for case in cases}


def tower_of(family: str, weights: dict[str, Tensor]) -> set[str]:
    return set(unread_weights(build_vision(family), weights))


@pytest.mark.parametrize(
    ("family", "vision", "stage"),
    [
        ("qwen3_vl", "train", 3),
        ("llava", "train", 2),
        ("qwen3_vl", "freeze", 3),
        ("qwen3_vl", "train", 0),
        ("qwen3_vl", "train", 1),
        ("qwen3_vl", "freeze", 1),
        slow("llava", "train", 1),
        slow("llava", "train", 3),
        slow("gemma3", "train", 3),
        slow("gemma3", "freeze", 2),
    ],
)
def test_ranks_and_stages_do_not_change_an_update(
    family: str,
    vision: str,
    stage: int,
    folders: dict[str, Path],
    alone: dict[tuple[str, str], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """One rank has no image, and in one step neither has: stage 3 would wait for the tower's weights forever."""
    expected = alone[family, vision]
    arguments = folders[family], batch_of(family), vision, {"stage": stage}
    found = run_ranks(train, 2, tmp_path / "ranks", *arguments)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in found["weights"].items():
        if not name.endswith("k_proj.bias"):  # attention does not depend on it: Adam scales what rounding leaves
            assert float((weight - expected["weights"][name]).abs().mean()) < 1e-4, name


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_a_tower_is_kept_or_trained_without_decay(
    family: str, alone: dict[tuple[str, str], dict[str, Any]], folders: dict[str, Path]
) -> None:
    """Llava does not read the last layer of its tower, which weight decay would shrink."""
    before = dict(build_vision(family, spread=2.0).named_parameters())
    frozen, trained = (alone[family, vision]["weights"] for vision in ("freeze", "train"))
    tower = tower_of(family, trained)
    unread = {name for name in tower if ".layers.2." in name or "post_layernorm" in name} if family == "llava" else ()
    assert all(torch.equal(frozen[name], before[name]) for name in tower)
    assert (family == "llava") == bool(unread)
    for name in trained:
        assert torch.equal(trained[name], before[name]) == (name in unread), name


@pytest.mark.parametrize(("family", "stage"), [("qwen2_5_vl", 3), slow("qwen2_5_vl", 2), slow("gemma3", 3)])
def test_transformers_reads_a_trained_tower(family: str, stage: int, tmp_path: Path, world: World) -> None:
    """Under the names that the loaded folder has, with its processor; it computes what training computes."""
    loaded = save_vision(tmp_path / "loaded", family, build_vision(family, spread=2.0))
    spec = actor_spec(loaded, stage=stage)
    engine = build_actor(replace(spec, model=replace(spec.model, vision="train")), world)
    ids, real, images = batch_of(family)
    text = real & ~torch.isin(ids, torch.tensor(engine.module.head.convention.banned))
    engine.backward(sft_loss(engine(ids, real, text, images=images)[0], mask=text).total, count=100)
    engine.step()
    saved = tmp_path / "saved"
    save_model(saved, full_tensors(engine.lm, world), lm=engine.lm, tokenizer=load_tokenizer(str(loaded)), world=world)
    before, after = weights_in(loaded), weights_in(saved)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "patch_embed" in name)
    files = ("preprocessor_config.json", "processor_config.json")
    assert all((saved / name).read_bytes() == (loaded / name).read_bytes() for name in files)
    with torch.no_grad():
        logprobs, _ = engine(ids, real, text, images=images)
        opened = Policy(AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32).eval())
        found, _ = opened(ids, real, text, images=images)
    torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
    ImageProcessor.load(str(saved), load_tokenizer(str(saved)))


def test_what_cannot_train_a_tower_is_refused() -> None:
    def choose(lm: Any, lora: LoraConfig | None) -> None:
        choose_trained(lm, lora, "causal_lm", learns=True, seed=0, trains_vision=True)

    with user_error("model.vision train needs a model that reads images, but images need a vision-language model, got"):
        choose(tiny_model(), None)
    with user_error("model.vision train trains the weights of the tower, got lora"):
        choose(build_vision("llava"), LoraConfig())
    assert ModelConfig().vision == "freeze"
