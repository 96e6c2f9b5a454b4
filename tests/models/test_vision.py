"""Rows with images, packed and padded, against forwards of transformers for one row at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.functional.distillation import DistillationRule
from hybrid_rlhf.models.distillation import Teacher
from hybrid_rlhf.models.families.vision import VISION_FAMILIES
from hybrid_rlhf.models.packing import packs, saved_rows, set_tensor_world, use_packing
from hybrid_rlhf.models.policy import Policy, Scorer, TeacherTargets, scores_at_end
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.structure import backbone_of, text_model_of
from hybrid_rlhf.models.vision import ImageEncoder, Images
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.tiny import tiny_model
from tests.support.vision import (
    FAMILIES,
    MIXED,
    Chat,
    build_vision,
    chat_ids,
    model_arguments,
    of_transformers,
    padded_chats,
    picture,
    pictures_of,
    random_lm,
    require_same_gradients,
    row_images,
    save_vision,
    text_mask,
    vision_processor,
)

ALIKE: list[Chat] = [(["Compare ", picture(3), picture(4)], answer) for answer in ("one", "twelve", "a hundred")] + [
    (["Compare ", picture(3), picture(8, picture(4).size)], "four")
]
"""Three rows with one prompt, and one with a prompt of the same tokens whose second picture differs."""
FEW = ("qwen3_vl", "gemma3", "idefics3")


def every(*few: str) -> list[Any]:
    """Some families, the others as `faults`."""
    return [family if family in few else pytest.param(family, marks=pytest.mark.faults) for family in FAMILIES]


@pytest.mark.parametrize("family", every(*FEW))
@pytest.mark.parametrize("chats", [MIXED, ALIKE], ids=["mixed", "alike"])
def test_rows_equal_those_of_transformers(family: str, chats: list[Chat]) -> None:
    """Log-probs and gradients, those of the tower too; equal pictures pass it once."""
    torch.set_num_threads(1)
    theirs, ours = random_lm(family), random_lm(family)
    use_packing(ours)
    ids, real, images = padded_chats(family, chats)
    mask = text_mask(ours, ids, real)
    policy = Policy(ours)
    calls = []
    encode = ImageEncoder.features
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageEncoder, "features", lambda self, x: calls.append(x) or encode(self, x))
        logprobs, _ = policy(ids, real, mask, images=images)
    rows = of_transformers(family, theirs, chats)
    weights = [torch.linspace(-1, 1, len(row)) for row in rows]
    picked = [mask[row, 1 : len(expected) + 1] for row, expected in enumerate(rows)]
    for row, expected in enumerate(rows):
        found = logprobs[row, 1 : len(expected) + 1]
        torch.testing.assert_close(found[picked[row]], expected[picked[row]], atol=1e-5, rtol=0)
    ours_total = sum(
        (logprobs[row, 1 : len(of_row) + 1] * of_row)[picked[row]].sum() for row, of_row in enumerate(weights)
    )
    theirs_total = sum((rows[row] * of_row)[picked[row]].sum() for row, of_row in enumerate(weights))
    ours_total.backward()
    theirs_total.backward()
    require_same_gradients(ours, theirs)
    (read,) = calls
    distinct = {image.key: image for row in images.rows for image in row}
    pixels = [image.load()["pixel_values"] for image in distinct.values()]
    assert read["pixel_values"].shape == torch.cat(pixels, dim=VISION_FAMILIES[family].joined_dim).shape
    shares = chats is ALIKE and family not in ("gemma3", "qwen3_5", "qwen3_5_moe")
    assert bool(saved_rows(ours)) == shares
    assert packs(ours)


@pytest.mark.parametrize("family", every("glm4v"))
def test_padded_rows_equal_packed_ones(family: str) -> None:
    """Padded on the left, by a model whose attention does not separate packed rows."""
    torch.set_num_threads(1)
    lm = random_lm(family)
    ids, real, images = padded_chats(family, MIXED)
    left = real.to(torch.int8).argsort(dim=1, stable=True)
    moved = ids.gather(1, left), real.gather(1, left)
    with torch.no_grad():
        padded, _ = Policy(lm)(*moved, text_mask(lm, *moved), images=images)
        use_packing(lm)
        packed, _ = Policy(lm)(ids, real, text_mask(lm, ids, real), images=images)
    torch.testing.assert_close(padded[moved[1]], packed[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", every("qwen2_5_vl"))
def test_rows_of_pictures_that_differ_share_no_image(family: str) -> None:
    """Their tokens are equal; without keys the second row would see the first one's picture."""
    torch.set_num_threads(1)
    lm = random_lm(family)
    use_packing(lm)
    size = (64, 64)
    chats: list[Chat] = [(["Long enough to share: ", picture(seed, size), "?"], "yes") for seed in (1, 2)]
    ids, real, images = padded_chats(family, chats)
    assert torch.equal(ids[0], ids[1])
    mask = text_mask(lm, ids, real)
    with torch.no_grad():
        found, _ = Policy(lm)(ids, real, mask, images=images)
        alone = [Policy(lm)(ids[:1], real[:1], mask[:1], images=Images([row]))[0][0] for row in images.rows]
    torch.testing.assert_close(found, torch.stack(alone), atol=1e-5, rtol=0)
    assert float((alone[0] - alone[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("family", every("qwen3_vl"))
def test_a_blank_image_changes_nothing(family: str) -> None:
    """A batch without an image calls the tower, whose gradient is 0."""
    torch.set_num_threads(1)
    lm = random_lm(family)
    use_packing(lm)
    ids, real, images = padded_chats(family, [(["no image"], "none"), (["nor here"], "")])
    policy = Policy(lm)
    plain, _ = policy(ids, real, real)
    plain.sum().backward()
    expected = {name: weight.grad.clone() for name, weight in lm.named_parameters() if weight.grad is not None}
    lm.zero_grad()
    found, _ = policy(ids, real, real, images=replace(images, blank=vision_processor(family).blank()))
    found.sum().backward()
    for logprobs in (found, policy(ids, real, real, images=images)[0]):
        torch.testing.assert_close(logprobs, plain, atol=1e-6, rtol=0)
    tower = 0
    for name, weight in lm.named_parameters():
        if name in expected:
            torch.testing.assert_close(weight.grad, expected[name], atol=1e-5, rtol=1e-5)
        elif weight.grad is not None:
            tower += 1
            assert not weight.grad.any()
    assert tower > 5


@pytest.mark.parametrize("family", every(*FEW))
def test_encoded_images_are_what_the_language_model_reads(family: str) -> None:
    """For prefills: states, deep states and positions of one prompt, given to the language model."""
    torch.set_num_threads(1)
    lm = random_lm(family)
    content = ["Hi ", picture(3), " and ", picture(4), picture(3), "?"]
    ids = chat_ids(family, content)
    images = pictures_of(content)
    read = []
    handle = text_model_of(lm).register_forward_pre_hook(
        lambda module, args, options: read.append(options), with_kwargs=True
    )
    with torch.no_grad():
        lm(**model_arguments(family, ids, images))
        handle.remove()
        encoded = ImageEncoder(lm).encode(row_images(family, images), ids)
    options = read[0]
    torch.testing.assert_close(encoded.states, options["inputs_embeds"][0, encoded.places], atol=1e-5, rtol=1e-5)
    deep = options.get("deepstack_visual_embeds") or ()
    assert len(deep) == len(encoded.deep) == (2 if family == "qwen3_vl" else 0)
    for ours, theirs in zip(encoded.deep, deep, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    positions = options.get("position_ids")
    if positions is not None and positions.dim() == 3:
        assert encoded.positions is not None
        assert torch.equal(encoded.positions.t(), positions[-3:, 0])
    else:
        assert encoded.positions is None
    assert len(encoded.spans) == (3 if family == "gemma3" else 0)


def test_images_that_cannot_be_placed_are_an_error() -> None:
    """Tokens without an image are a fault of the caller, models and settings that read none one of the user."""
    ids, real, images = padded_chats("llava", [([picture(1), "?"], "yes")])
    lm = build_vision("llava")
    with pytest.raises(ValueError, match="a row has 16 image tokens, its images have 0"):
        Policy(lm)(ids, real, real, images=Images([[]]))
    with user_error("images need a vision-language model, got llama: choose a type that docs/models.md lists"):
        Policy(tiny_model())(ids, real, real, images=images)
    set_tensor_world(lm, cast("World", SimpleNamespace(size=2)))
    with user_error("images need model.sequence_parallel and model.tensor_parallel 1, got 2 ranks that compute rows"):
        Policy(lm)(ids, real, real, images=images)


@pytest.mark.parametrize("family", every("qwen3_vl"))
def test_bfloat16_is_as_exact_as_transformers(family: str) -> None:
    """Against float32, whose rounding is 2**16 times finer."""
    torch.set_num_threads(1)
    exact, low = random_lm(family), random_lm(family).bfloat16()
    ids, real, images = padded_chats(family, MIXED)
    mask = text_mask(exact, ids, real)[:, 1:]
    with torch.no_grad():
        wanted, theirs = (pad_sequence(of_transformers(family, lm, MIXED), batch_first=True) for lm in (exact, low))
        use_packing(low)
        found = Policy(low)(ids, real, real, images=images)[0][:, 1:]
    errors = [float((logprobs.float() - wanted)[mask].abs().mean()) for logprobs in (found, theirs)]
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("family", every("idefics3", "gemma3"))
def test_scores_equal_those_of_single_rows(family: str, tmp_path: Path) -> None:
    """A scorer of a causal LM's folder, which transformers' class for most types does not exist for; after its last
    token each row has the score that its own forward gives."""
    torch.set_num_threads(1)
    scorer, fresh = load_model(
        str(save_vision(tmp_path, family, random_lm(family))), "scorer", config=ModelConfig(), dtype=torch.float32
    )
    assert fresh and type(scorer).__name__.endswith("ForSequenceClassification")
    torch.nn.init.normal_(scorer.score.weight)
    ids, real, images = padded_chats(family, MIXED)
    with torch.no_grad():
        found = scores_at_end(Scorer(scorer)(ids, real, images=images), real)
        expected = []
        for content, answer in MIXED:
            pictures = pictures_of(content)
            arguments = model_arguments(family, chat_ids(family, content, answer), pictures)
            expected.append(scorer.score(backbone_of(scorer)(**arguments).last_hidden_state[0, -1]))
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", every("qwen3_vl"))
def test_a_student_learns_from_what_a_teacher_sees(family: str) -> None:
    """The divergence of whole logits, without the tokens of images."""
    torch.set_num_threads(1)
    taught, teacher = random_lm(family), build_vision(family, seed=1, spread=2.0)
    for lm in (taught, teacher):
        use_packing(lm)
    ids, real, images = padded_chats(family, MIXED)
    mask = text_mask(taught, ids, real)
    student, other, rule = Policy(taught), Teacher(teacher), DistillationRule("forward")
    with torch.no_grad():
        targets = TeacherTargets(other(ids, real, mask, images=images), other.head, rule)
        total, *_ = student(ids, real, mask, 1.0, targets, images=images)
        expected = 0.0
        banned = list(student.head.convention.banned)
        others = [token for token in range(len(student.head.weight)) if token not in banned]
        for row, (content, answer) in enumerate(MIXED):
            pictures = pictures_of(content)
            arguments = model_arguments(family, chat_ids(family, content, answer), pictures)
            ours, theirs = (lm(**arguments).logits[0, :-1, others].log_softmax(-1) for lm in (taught, teacher))
            apart = (theirs.exp() * (theirs - ours)).sum(dim=-1)
            expected += float(apart[mask[row, 1 : len(apart) + 1]].sum())
    assert float(total) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("learns", [False, True])
def test_a_frozen_tower_stores_nothing_for_a_backward(learns: bool) -> None:
    """Checkpointing would store the inputs of its layers, as it asks for their gradients; the head is trained."""
    lm = build_vision("qwen3_vl")
    for name, weight in lm.named_parameters():
        weight.requires_grad = learns or ".visual." not in name
    lm.gradient_checkpointing_enable()
    lm.enable_input_require_grads()
    lm.train()
    encoder = ImageEncoder(lm)
    arguments = encoder.joined(row_images("qwen3_vl", [picture(1)]), torch.float32)
    assert all(part.requires_grad == learns for part in encoder.features(arguments))
