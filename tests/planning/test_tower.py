"""Plans of models that read images, against the memory of real forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.generation.image_loading import KEPT_PIXEL_BYTES
from hybrid_rlhf.models.lora import choose_trained
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.vision import ImageEncoder
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.live_bytes import LiveBytes
from hybrid_rlhf.planning.phase_memory import PhaseMemory
from hybrid_rlhf.planning.shapes import BatchShape, ShapedModel, shaped_model
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.commands import CommandLine
from tests.support.vision import (
    FAMILIES,
    build_vision,
    padded_chats,
    picture,
    row_images,
    save_vision,
    text_mask,
    vision_folder,
)

SIDE = 64
IMAGES = 4
MACHINE = Device(torch.device("cuda"), 1, 80 * 2**30)
FEW = ("gemma3", "idefics3", "qwen2_5_vl", "qwen3_vl")


def shaped(family: str, config: ModelConfig) -> ShapedModel:
    path = str(vision_folder(family))
    options = {"config": config, "dtype": torch.float32, "lora": None, "learns": True}
    return shaped_model(path, "causal_lm", max_image_pixels=SIDE * SIDE, **options)


def loaded(family: str, config: ModelConfig) -> PreTrainedModel:
    """A model that trains as the planned one, with gradients of all weights that learn."""
    lm, _ = load_model(str(vision_folder(family)), "causal_lm", config=config, dtype=torch.float32)
    choose_trained(lm, None, "causal_lm", learns=True, seed=0, trains_vision=config.vision == "train")
    for weight in lm.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    return lm.train()


def peak(lm: PreTrainedModel, forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward and a backward add."""
    counter = LiveBytes("cpu")
    for tensor in (*lm.parameters(), *lm.buffers(), *(p.grad for p in lm.parameters() if p.grad is not None)):
        counter.count(tensor.detach())
    before = counter.live
    with counter:
        total = forward()
        if total.requires_grad:
            total.backward()
    return counter.peak - before


@pytest.mark.parametrize(
    "family", [name if name in FEW else pytest.param(name, marks=pytest.mark.faults) for name in FAMILIES]
)
@pytest.mark.parametrize("settings", [{}, {"vision": "train"}, {"vision": "train", "gradient_checkpointing": True}])
def test_a_tower_takes_what_was_planned(family: str, settings: dict[str, object]) -> None:
    """From the tokens of one image and two: masks of idefics3, which have values on the host, are left out."""
    torch.set_num_threads(1)
    config = ModelConfig(**settings)
    planned = shaped(family, config)
    assert planned.tower is not None
    lm = loaded(family, config)
    encoder = ImageEncoder(lm)
    images = row_images(family, [picture(seed, (SIDE, SIDE)) for seed in range(IMAGES)])
    arguments = encoder.joined(images, torch.float32)
    held = []

    def forward() -> Tensor:
        on_device = {name: values.clone() for name, values in arguments.items()}
        held.extend([*on_device.values(), *encoder.features(on_device)])
        return torch.stack([state.sum() for state in held[len(on_device) :]]).sum()

    tokens = sum(image.tokens for image in images)
    ratio = planned.tower.measure(tokens, backward=True).peak / peak(lm, forward)
    assert 0.85 <= ratio <= 1.1, f"{ratio:.3f}"


@pytest.mark.parametrize("vision", ["freeze", "train"])
def test_a_batch_with_images_takes_what_was_planned(vision: str) -> None:
    """The states of images are alive while the language model computes."""
    torch.set_num_threads(1)
    config = ModelConfig(vision=vision)
    lm = loaded("qwen3_vl", config)
    policy = Policy(lm)
    ids, real, images = padded_chats("qwen3_vl", [([picture(seed, (SIDE, SIDE)) for seed in range(IMAGES)], "")])
    mask = text_mask(lm, ids, real)
    taken = peak(lm, lambda: policy(ids, real, mask, images=images)[0].sum())
    length, tokens = ids.shape[1], sum(image.tokens for image in images.rows[0])
    batch = BatchShape(1, length, int(mask.sum()), image_tokens=tokens)
    ratio = shaped("qwen3_vl", config).measure(batch, backward=True).peak / taken
    assert 0.9 <= ratio <= 1.15, f"{ratio:.3f}"


def sft_phase(path: str | Path, *more: str) -> PhaseMemory:
    arguments = ["--model.path", str(path), "--data.sources", "[rows.jsonl]", "--data.max_length", "128", *more]
    (phase,) = Planner(MACHINE).phases(parse_config(SFTConfig, arguments))
    return phase


def test_a_plan_has_the_part_of_the_tower(tmp_path: Path) -> None:
    """A model without a processor reads text, whose plan has no images."""
    frozen, trained = (sft_phase(vision_folder("qwen3_vl"), "--model.vision", vision) for vision in ("freeze", "train"))
    folder = save_vision(tmp_path, "qwen3_vl")
    (folder / "preprocessor_config.json").unlink()
    text = sft_phase(folder)
    assert text.tower is None and frozen.tower is not None and trained.tower is not None
    assert frozen.need.weights == text.need.weights and frozen.need.host == text.need.host + KEPT_PIXEL_BYTES
    assert frozen.tower.optimizer == frozen.tower.gradients == 0.0
    tower = sum(weight.numel() for name, weight in build_vision("qwen3_vl").named_parameters() if "visual" in name)
    assert frozen.tower.weights == trained.tower.weights == pytest.approx(2 * tower)
    assert trained.need.optimizer - frozen.need.optimizer == pytest.approx(trained.tower.optimizer)
    assert trained.tower.activations > frozen.tower.activations > 0
    assert frozen.need.activations > text.need.activations


def test_samples_of_a_prompt_share_its_images() -> None:
    """Of all completions in a micro-batch; the engine keeps states of images."""
    path = str(vision_folder("gemma3"))
    arguments = ["--model.path", path, "--data.sources", "[rows.jsonl]", "--algorithm", "grpo"]
    arguments += ["--rollout.max_prompt_tokens", "64", "--rollout.sampling.max_new_tokens", "64"]
    arguments += ["--reward.components", "[{verifier: math}]"]

    def phases(samples: int) -> dict[str, PhaseMemory]:
        config = parse_config(RLConfig, [*arguments, "--rollout.sampling.n", str(samples)])
        return {phase.name: phase for phase in Planner(MACHINE).phases(config)}

    one, eight = phases(2), phases(16)
    assert one["actor training"].tower and eight["actor training"].tower
    assert eight["actor training"].tower.buffers < one["actor training"].tower.buffers
    generation = one["generation"]
    assert generation.tower is not None and 0 < generation.tower.buffers < generation.need.buffers
    assert generation.need.buffers > 2**28


def test_the_table_has_a_line_of_the_tower(cli: CommandLine) -> None:
    model = vision_folder("qwen3_vl")
    code, text, _ = cli(f"plan --base_model {model} --machine h100 --steps sft --sft.model.vision train")
    assert code == 0
    training, tower = text.splitlines()[text[: text.index("  vision tower")].count("\n") - 1 :][:2]
    assert training.startswith("SFT training") and tower.startswith("  vision tower")
    assert len(tower.split()) == len(["vision", "tower", *range(9)])
