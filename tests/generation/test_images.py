"""Prompts with images, against transformers' `generate` and forward."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.functional.logprobs import agreement
from hybrid_rlhf.generation import Completion, GenerationEngine, SamplingParams
from hybrid_rlhf.generation.batching import capacity, continuous, workspace
from hybrid_rlhf.generation.batching.images import EncodedPrompts, PromptImages
from hybrid_rlhf.generation.model.cache import BLOCK_TOKENS, page_bytes
from hybrid_rlhf.generation.open_batch import PromptBatch
from hybrid_rlhf.generation.ops import choice
from hybrid_rlhf.generation.ops import gpu as kernels
from hybrid_rlhf.generation.scoring import InferenceScorer, described_scorer
from hybrid_rlhf.generation.weights.inference_weights import InferenceWeights
from hybrid_rlhf.generation.weights.probe import (
    LOW_PRECISION_TOLERANCE,
    check_inference_weights,
    probe_hidden,
    probe_logprobs,
)
from hybrid_rlhf.models.head_check import module_logprobs, probe_tokens
from hybrid_rlhf.models.policy import Scorer
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.structure import language_model_of, layer_list, text_model_of
from hybrid_rlhf.models.vision import EncodedImages, ImageEncoder, RowImage
from hybrid_rlhf.runtime.world import World, solo_world
from tests.support.errors import user_error
from tests.support.generation import Steps, engine_of, token_ids_of
from tests.support.marks import faults
from tests.support.ranks import run_ranks
from tests.support.vision import (
    FAMILIES,
    Change,
    build_vision,
    chat_ids,
    greedy_of_transformers,
    model_arguments,
    padded_chats,
    picture,
    pictures_of,
    prompt_images,
    row_images,
    vision_folder,
    vision_processor,
)

Content = Sequence[str | Image.Image]
CONTENTS: list[Content] = [
    [picture(1), "What colour?"],
    [picture(2), "What colour?"],
    ["Hi ", picture(3), " and ", picture(4), " differ?"],
    ["no image here"],
    [picture(5, (64, 24)), "x"],
    [picture(1), "What colour?"],
]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
SAMPLED = SamplingParams(max_new_tokens=40, n=3, seed=7, ignore_eos=True)
DEFAULT = ("gemma3", "qwen3_5", "qwen3_vl")
"""Two directions, recurrent layers, and positions with axes beside states added after layers."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of a model, and what transformers computes for them."""

    lm: PreTrainedModel
    family: str
    contents: Sequence[Content]
    encoded: list[int]
    """Indices of the prompts, in the order in which their images were encoded."""

    @staticmethod
    def of(family: str, contents: Sequence[Content] = CONTENTS, lm: PreTrainedModel | None = None) -> Prompts:
        return Prompts(lm or build_vision(family), family, contents, [])

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        return [chat_ids(self.family, content) for content in self.contents]

    @functools.cached_property
    def pictures(self) -> list[list[Image.Image]]:
        return [pictures_of(content) for content in self.contents]

    def images(self, change: Change = lambda encoded: encoded) -> list[PromptImages | None]:
        """The images of each prompt, changed when they are encoded."""

        def noted(index: int, encoded: EncodedImages) -> EncodedImages:
            self.encoded.append(index)
            return change(encoded)

        encoder = ImageEncoder(self.lm)
        rows = [row_images(self.family, pictures) for pictures in self.pictures]
        return [prompt_images(encoder, self.ids[i], row, functools.partial(noted, i)) for i, row in enumerate(rows)]

    def greedy(self, new_tokens: int = GREEDY.max_new_tokens) -> list[list[int]]:
        """Completions by transformers' `generate`."""
        return [
            greedy_of_transformers(self.family, self.lm, ids, pictures, new_tokens)
            for ids, pictures in zip(self.ids, self.pictures, strict=True)
        ]

    @torch.no_grad()
    def logprobs(self, index: int, completion: Sequence[int] = ()) -> Tensor:
        """Log-probs [P + n - 1] of a prompt and its completion but for the first token, by a forward of all."""
        ids = [*self.ids[index], *completion]
        logits = self.lm(**model_arguments(self.family, ids, self.pictures[index])).logits[0, :-1].float()
        logits[:, list(vision_processor(self.family).banned_ids)] = -torch.inf
        return selected(logits, ids[1:])

    def difference(self, found: Iterable[Sequence[Completion]]) -> float:
        """Largest difference of the log-probs of completions, one of each prompt, from those of a forward."""
        return max(
            float((torch.tensor(one.logprobs) - self.logprobs(index, one.token_ids)[-len(one.logprobs) :]).abs().max())
            for index, [one] in enumerate(found)
        )


def selected(logits: Tensor, labels: Sequence[int]) -> Tensor:
    """Log-probs [n] of labels under logits [n, V]."""
    return logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]


def by_family(*default: str) -> pytest.MarkDecorator:
    """All families, of which some are in the default run."""
    return pytest.mark.parametrize("family", [name if name in default else faults(name) for name in FAMILIES])


@by_family(*DEFAULT, "glm4v", "idefics3")
def test_completions_are_those_of_generate(family: str) -> None:
    """With chunks that end inside images, unless their tokens attend to each other in both directions."""
    prompts = Prompts.of(family)
    engine = engine_of(prompts.lm, None, max_batch_rows=3, prefill_tokens=48)
    found = engine.generate(prompts.ids, replace(GREEDY, max_new_tokens=24), images=prompts.images())
    assert [one.token_ids for [one] in found] == prompts.greedy(24)
    assert prompts.difference(found) < 1e-5


def changed(encoded: EncodedImages, part: str) -> EncodedImages:
    """Encoded images without a part."""
    if part == "states":
        return replace(encoded, states=torch.zeros_like(encoded.states))
    if part == "offset":
        encoded.positions[-1] = len(encoded.positions) - 1
        return encoded
    return replace(encoded, **{part: None if part == "positions" else ()})


@pytest.mark.parametrize(
    ("family", "part"),
    [*(("qwen3_vl", part) for part in ("deep", "positions", "offset", "states")), ("gemma3", "spans")],
)
def test_each_part_of_encoded_images_is_read(family: str, part: str) -> None:
    prompts = Prompts.of(family, CONTENTS[:3], build_vision(family, spread=3.0))
    found = engine_of(prompts.lm).generate(
        prompts.ids, GREEDY, images=prompts.images(lambda encoded: changed(encoded, part))
    )
    assert prompts.difference(found) > 1e-2


@by_family(*DEFAULT)
def test_in_bfloat16_log_probs_differ_by_rounding(family: str) -> None:
    prompts = Prompts.of(family, CONTENTS[:3], build_vision(family, spread=2.0).bfloat16())
    found = engine_of(prompts.lm).generate(prompts.ids, GREEDY, images=prompts.images())
    for index, [one] in enumerate(found):
        expected = prompts.logprobs(index, one.token_ids)[-len(one.logprobs) :]
        mine = torch.tensor(one.logprobs)
        assert agreement(mine, expected=expected, dtype=torch.bfloat16, low_precision=LOW_PRECISION_TOLERANCE).holds


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl", faults("idefics3"), faults("llava")])
def test_equal_prompts_share_blocks_only_if_their_pictures_are_equal(family: str, read: list[int]) -> None:
    contents = [[picture(i % 4, (48, 48)), "Describe the picture in one short sentence, please."] for i in range(8)]
    prompts = Prompts.of(family, contents)
    assert len({tuple(ids) for ids in prompts.ids}) == 1
    engine = engine_of(prompts.lm, None)
    images = prompts.images()
    expected = prompts.greedy()
    assert len({tuple(completion) for completion in expected}) == 4
    computed = []
    for _ in range(2):
        read.clear()
        found = engine.generate(prompts.ids, GREEDY, images=images)
        assert [one.token_ids for [one] in found] == expected
        computed.append(sum(read) - 8 * (GREEDY.max_new_tokens - 1))
    length = len(prompts.ids[0])
    assert computed[0] <= 4 * length + 4 * BLOCK_TOKENS or family == "qwen3_5", "states are shared after a step"
    assert computed[1] <= 8 * BLOCK_TOKENS
    assert prompts.encoded == [0, 1, 2, 3], "equal pictures in the same places are encoded once"
    read.clear()
    engine.generate(prompts.ids[:1], replace(SAMPLED, n=8, max_new_tokens=1), images=images[:1])
    assert sum(read) <= BLOCK_TOKENS, "once for all samples"


def test_a_further_turn_reads_what_is_new(read: list[int]) -> None:
    """Its last picture too, which follows cached ones."""
    prompts = Prompts.of("qwen3_vl", [["Hi ", picture(3), "!"], ["Hi ", picture(3), "! And ", picture(4), "?"]])
    engine = engine_of(prompts.lm, None)
    images = prompts.images()
    short, long = prompts.ids
    shared = next(i for i, pair in enumerate(zip(short, long, strict=False)) if len(set(pair)) > 1)
    for prompt, image in zip((short, long), images, strict=True):
        engine.generate([prompt], replace(GREEDY, max_new_tokens=1), images=[image])
    assert read == [len(short), len(long) - shared]
    again, [[one]] = [*long, 9, 9], engine.generate([long], GREEDY, images=images[1:])
    read.clear()
    [[other]] = engine.generate([[*again]], GREEDY, images=images[1:])
    assert read[0] < 8 and prompts.encoded == [0, 1], "encoded images serve what continues their prompt"
    assert one.token_ids == prompts.greedy()[1]
    fresh = engine_of(prompts.lm, None).generate([again], GREEDY, images=images[1:])
    assert other.token_ids == fresh[0][0].token_ids


@pytest.mark.parametrize("family", [*DEFAULT, faults("idefics3")])
@pytest.mark.parametrize("kept", [0, 2**28])
def test_preempted_requests_encode_again_what_is_not_kept(
    family: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [[picture(i), f"What colour is it, {i}?", picture(20 + i), "and this?"] for i in range(5)]
    prompts = Prompts.of(family, contents)
    free = engine_of(prompts.lm)
    expected = token_ids_of(free.generate(prompts.ids, SAMPLED, images=prompts.images()))
    assert sorted(prompts.encoded) == [*range(5)]
    prompts.encoded.clear()
    monkeypatch.setattr(continuous.ExpectedLength, "of", lambda self, limit: 1.0)
    monkeypatch.setattr(capacity.Sequences, "least_pages", lambda self, rows: self.longest_pages)
    monkeypatch.setattr(capacity, "_SAVED_STATES_SHARE", 1.0)
    layout = free.backend.held.cache.layout
    pages = 1 + 2 * layout.pages_of(max(map(len, prompts.ids)) + 40, computed_together=64)
    gib = (pages * page_bytes(layout, torch.float32) + 48 * free.backend.decoder.state_bytes) / 2**30
    tight = engine_of(prompts.lm, kv_cache_gib=gib, prefill_tokens=64)
    tight.backend._encoded = EncodedPrompts(kept)
    assert token_ids_of(tight.generate(prompts.ids, SAMPLED, images=prompts.images())) == expected
    assert tight.backend.preemptions > 0
    assert (len(prompts.encoded) > 5) == (kept == 0)


def test_only_the_last_encoded_images_are_kept() -> None:
    """Within the bytes of two prompts."""
    encoded = EncodedImages([0], torch.zeros(1, 8), (torch.zeros(1, 8),))
    calls = list[int]()
    images = [PromptImages([0], [-1 - i], lambda i=i: calls.append(i) or encoded) for i in range(3)]
    kept = EncodedPrompts(2 * 2 * encoded.states.nbytes)
    for index in (0, 1, 0, 2, 0, 1):
        kept.of(images[index])
    assert calls == [0, 1, 2, 1]
    kept.clear()
    kept.of(images[0])
    assert calls[4:] == [0]


def test_a_changed_tower_is_read(read: list[int]) -> None:
    prompts = Prompts.of("qwen3_vl", CONTENTS[:3])
    engine = engine_of(prompts.lm, None)
    before = token_ids_of(engine.generate(prompts.ids, GREEDY, images=prompts.images()))
    text, _ = language_model_of(prompts.lm)
    with torch.no_grad():
        for name, weight in prompts.lm.named_parameters():
            if not name.startswith((text, "lm_head")):
                weight.mul_(1.5)
    after = token_ids_of(engine.generate(prompts.ids, GREEDY, images=prompts.images()))
    assert after == [[completion] for completion in prompts.greedy()] != before


def test_images_of_an_open_batch() -> None:
    """Tokens, log-probs of prompts, and an image that cannot be encoded, whose request ends alone."""
    prompts = Prompts.of("qwen3_vl", CONTENTS[:4])
    engine = engine_of(prompts.lm, None)
    expected = prompts.greedy()
    images = prompts.images()
    assert [*engine.stream(prompts.ids[2], GREEDY, images=images[2])] == expected[2]
    whole, broken = Steps(), Steps()
    with engine.open(rows=4, max_tokens=400) as batch:
        lost = PromptImages(images[0].places, [-5] * len(images[0].keys), lambda: 1 / 0)
        failed = batch.submit(PromptBatch(prompts.ids[:1], GREEDY, images=[lost]), broken.put)
        batch.submit(PromptBatch(prompts.ids, GREEDY, images=images), whole.put)
        found = [[], [], [], []]
        while any(not tokens or tokens[-1].finish_reason is None for tokens in found):
            for token in whole.get(timeout=60):
                found[token.prompt].append(token)
        assert [[token.token_id for token in tokens] for tokens in found] == expected
        assert broken.get(timeout=60) == [] and isinstance(failed.error, ZeroDivisionError)
        logprobs = batch.prompt_logprobs(prompts.ids[2], images=images[2]).result().logprobs
        assert logprobs == pytest.approx(prompts.logprobs(2).tolist(), abs=1e-5)
        with user_error("one placeholder per token of its images, prompt 0 has .* for 0"):
            batch.prompt_logprobs(prompts.ids[2])


@by_family("qwen3_vl")
def test_a_probe_observes_what_the_layers_of_the_model_return(family: str) -> None:
    prompts = Prompts.of(family, CONTENTS[2:3])
    decoder = engine_of(prompts.lm).backend.decoder
    expected = list[Tensor]()
    for layer in layer_list(prompts.lm):
        layer.register_forward_hook(lambda _, inputs, output: expected.append(output[0]))
    logprobs = prompts.logprobs(0)
    with torch.no_grad():
        [images] = [images.encode() for images in prompts.images()]
    embedded, *found = probe_hidden(decoder, prompts.ids[0], images)
    assert torch.equal(embedded[images.places], images.states)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(probe_logprobs(decoder, prompts.ids[0], images), logprobs, atol=1e-5, rtol=0)


@by_family(*DEFAULT)
def test_scores_are_those_of_the_training_forward(family: str) -> None:
    path = str(vision_folder(family))
    lm, _ = load_model(path, "scorer", config=ModelConfig(path=path), dtype=torch.float32)
    torch.nn.init.normal_(lm.score.weight)
    chats = [([picture(1), "What?"], "red"), (["no image"], "here"), (["Hi ", picture(3), picture(4)], "abc")]
    ids, real, images = padded_chats(family, chats)
    encoder = ImageEncoder(lm)
    named = dict(lm.named_parameters())
    weights = InferenceWeights(described_scorer(lm, named), world=solo_world(ids.device), dtype=torch.float32)
    scorer = InferenceScorer(weights.build((name, weight, True) for name, weight in named.items()))
    with torch.no_grad():
        expected = Scorer(lm)(ids, real, images=images)
        rows = zip(images.rows, ids, real, strict=True)
        encoded = [encoder.encode(row, tokens[mask].tolist()) if row else None for row, tokens, mask in rows]
    torch.testing.assert_close(scorer(ids, real, encoded), expected, atol=1e-4, rtol=0)


def test_wrong_weights_are_noticed_with_banned_tokens() -> None:
    lm = build_vision("qwen3_vl").bfloat16()
    decoder = engine_of(lm).backend.decoder
    expected = module_logprobs(lm, probe_tokens(decoder.architecture.vocab_size))
    check_inference_weights(decoder, expected)
    with user_error("inference weights must agree"):
        check_inference_weights(decoder, expected - 1.0)


def tokens_of_rank(
    world: World, family: str, folder: str, prompts: list[list[int]], rows: list[list[RowImage]]
) -> list[list[int]]:
    """Greedy completions of a model that the ranks share, with a tower on each."""
    encoder = ImageEncoder(build_vision(family))
    engine = GenerationEngine.from_pretrained(folder, dtype=torch.float32, group=world.group)
    images = [prompt_images(encoder, ids, row) for ids, row in zip(prompts, rows, strict=True)]
    return [one.token_ids for [one] in engine.generate(prompts, GREEDY, images=images)]


@pytest.mark.parametrize("family", ["qwen3_vl", faults("gemma3")])
def test_ranks_that_share_a_model_read_images(family: str, tmp_path: Path) -> None:
    prompts = Prompts.of(family, CONTENTS[:4])
    rows = [row_images(family, pictures) for pictures in prompts.pictures]
    found = run_ranks(tokens_of_rank, 2, tmp_path, family, str(vision_folder(family)), prompts.ids, rows)
    assert found == [prompts.greedy()] * 2


@pytest.mark.parametrize("backend", ["auto", "module"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 5, "temperature": 3.0},
        {"top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 2.0, "min_new_tokens": 3},
    ],
)
def test_a_placeholder_is_never_sampled(backend: str, settings: dict[str, float]) -> None:
    """Not even of a model that prefers it, and with a bias."""
    lm = build_vision("qwen2_5_vl")
    banned = vision_processor("qwen2_5_vl").banned_ids
    with torch.no_grad():
        lm.lm_head.weight[list(banned)] = text_model_of(lm).norm.weight * 10
    bias = dict.fromkeys(banned, 90.0) if settings.get("temperature") == 0 else {}
    params = SamplingParams(max_new_tokens=20, n=4, seed=3, ignore_eos=True, logit_bias=bias, **settings)
    [completions] = engine_of(lm, backend=backend).generate([[20, 30, 40]], params)
    assert not {token for one in completions for token in one.token_ids} & {*banned}
    assert all(torch.tensor(one.logprobs).isfinite().all() for one in completions)


def test_what_is_not_an_image_of_a_prompt_is_refused() -> None:
    prompts = Prompts.of("llava", CONTENTS[:2])
    images = prompts.images()
    engine = engine_of(prompts.lm)
    with user_error(r"images are one per prompt, got 1 for 2"):
        engine.generate(prompts.ids, GREEDY, images=images[:1])
    with user_error("prompt 1 has 16 for 0"):
        engine.generate(prompts.ids, GREEDY, images=[images[0], None])
    with user_error("images need inference weights of a model that reads them"):
        engine_of(prompts.lm, backend="module").generate(prompts.ids, GREEDY, images=images)


def test_kernels_of_a_gpu_have_the_tokens_of_torch(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows beside chunks, of which those with two directions are computed by torch."""
    monkeypatch.setattr(choice, "can_pack", lambda device, dtype: False)
    monkeypatch.setattr(workspace._Graphs, "__call__", lambda self, step, batch: step(batch).clone())
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    prompts = Prompts.of("gemma3", [["a"], [picture(2), "c"]], build_vision("gemma3", text=layers))
    short, found = replace(GREEDY, max_new_tokens=3), []
    for used in (kernels, None):
        monkeypatch.setattr(choice, "kernels_for", lambda device, dtype, used=used: used)
        engine = engine_of(prompts.lm, max_batch_rows=2, prefill_tokens=28)
        assert engine.backend.decoder.kernels is used
        found.append(token_ids_of(engine.generate(prompts.ids, short, images=prompts.images())))
    assert found[0] == found[1]
