"""Tiny random vision-language models with processors of transformers in folders, and pictures for them.

The families of VISION_FAMILIES; tokens are bytes, so that answers can be read. Processors are built without their
part for videos, as the library builds them.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.generation.batching.images import PromptImages
from hybrid_rlhf.models.families import has_mixers
from hybrid_rlhf.models.families.vision import VISION_FAMILIES
from hybrid_rlhf.models.policy import Policy
from hybrid_rlhf.models.pretrained.loading import load_model
from hybrid_rlhf.models.pretrained.processors import ImageProcessor
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.models.structure import backbone_of
from hybrid_rlhf.models.vision import EncodedImages, ImageEncoder, Images, RowImage
from tests.support.tiny import byte_tokenizer

FAMILIES = tuple(VISION_FAMILIES)
Change = Callable[[EncodedImages], EncodedImages]
Chat = tuple[Sequence[str | Image.Image], str]
"""Texts and pictures of a user's turn, and the answer."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template with content parts, in which IMAGE stands for what a family writes for an image."""
_BASE = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TILES = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)
]
_GLM = ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"]
_TOKENS = {
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "glm46v": _GLM,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "idefics3": _TILES,
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    "llava": ["<image>"],
    "smolvlm": [*_TILES, "<video>"],
    **dict.fromkeys(_QWEN_FAMILIES, _QWEN),
}
_NAMED = {
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
"""Tokens that the tokenizers of two families have as attributes."""
_WRITTEN = {
    "gemma3": "<start_of_image>",
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe"), "<|begin_of_image|><|image|><|end_of_image|>"),
    "internvl": "<IMG_CONTEXT>",
    **dict.fromkeys(("idefics3", "llava", "smolvlm"), "<image>"),
    **dict.fromkeys(_QWEN_FAMILIES, "<|vision_start|><|image_pad|><|vision_end|>"),
}
"""What templates write for an image."""
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GLM_ROPE = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_PATCHES = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_PATCH_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
}
_GLM_IMAGES = {**_PATCH_IMAGES, "size": {"shortest_edge": 16 * 16 * 2, "longest_edge": 64 * 64 * 2}}
_TILED = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
_SIDE = {"size": {"height": 32, "width": 32}}
_RECURRENT: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {
        **_ROPE,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
        {**_PATCHES, "depth": 2, "window_size": 32, "fullatt_block_indexes": [1]},
        _PATCH_IMAGES,
        {},
    ),
    "qwen3_vl": (
        {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {**_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        _PATCH_IMAGES,
        {},
    ),
    "qwen3_5": (
        _RECURRENT,
        {**_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        _PATCH_IMAGES,
        {},
    ),
    "qwen3_5_moe": (
        {
            **_RECURRENT,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        {**_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        _PATCH_IMAGES,
        {},
    ),
    "qwen2_vl": (
        {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
        {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8},
        _PATCH_IMAGES,
        {},
    ),
    "gemma3": (
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {**_VISION, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        {"image_processor_type": "Gemma3ImageProcessor", **_SIDE},
        {"image_seq_length": 4},
    ),
    "idefics3": (
        {"model_type": "llama"},
        {**_VISION, "image_size": 32, "patch_size": 8},
        {"image_processor_type": "Idefics3ImageProcessor", **_TILED},
        {"image_seq_len": 4},
    ),
    "smolvlm": (
        {"model_type": "llama"},
        {**_VISION, "image_size": 32, "patch_size": 8},
        {"image_processor_type": "SmolVLMImageProcessor", **_TILED},
        {"image_seq_len": 4},
    ),
    "llava": (
        {"model_type": "llama"},
        {
            **_VISION,
            "model_type": "clip_vision_model",
            "num_hidden_layers": 3,
            "image_size": 32,
            "patch_size": 8,
            "projection_dim": 32,
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
        },
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "glm4v": (
        {"rope_parameters": _GLM_ROPE},
        {**_PATCHES, "depth": 2, "image_size": 64},
        {**_GLM_IMAGES, "image_processor_type": "Glm4vImageProcessor"},
        {},
    ),
    "glm46v": (
        {"model_type": "glm4v_text", "rope_parameters": _GLM_ROPE},
        {**_PATCHES, "model_type": "glm4v_vision", "depth": 2, "image_size": 64},
        {**_GLM_IMAGES, "image_processor_type": "Glm46VImageProcessor"},
        {},
    ),
    "glm4v_moe": (
        {
            "head_dim": 16,
            "rope_parameters": _GLM_ROPE,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
        {**_PATCHES, "depth": 2, "image_size": 64},
        {**_GLM_IMAGES, "image_processor_type": "Glm4vImageProcessor"},
        {},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        {"image_processor_type": "GotOcr2ImageProcessor", **_SIDE, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4},
    ),
}
"""For each family: changes of the text model, the tower, settings of the image processor and of the processor."""


def _whole_config(family: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Fields of the whole config beside text model and tower."""
    ids = tokenizer.convert_tokens_to_ids
    fields: dict[str, Any] = {}
    if "qwen" in family:
        names = ("vision_start", "vision_end", "image", "video")
        fields = {f"{name}_token_id": ids(token) for name, token in zip(names, _QWEN, strict=True)}
    elif family == "gemma3":
        names = ("boi_token_index", "eoi_token_index", "image_token_index")
        fields = {"mm_tokens_per_image": 4, **dict(zip(names, ids(_TOKENS[family]), strict=True))}
    elif "glm" in family:
        names = ("image_start", "image_end", "image", "video", "video_start", "video_end")
        fields = {f"{name}_token_id": ids(token) for name, token in zip(names, _GLM, strict=True)}
    elif family == "internvl":
        fields = {"image_token_id": ids("<IMG_CONTEXT>"), "image_seq_length": 4, "downsample_ratio": 0.5}
    elif family == "llava":
        fields = {"image_token_index": ids("<image>"), "vision_feature_layer": -2}
    else:
        fields = {"image_token_id": ids("<image>"), "scale_factor": 2}
    return {"tie_word_embeddings": False, **fields}


def vision_tokenizer(family: str) -> PreTrainedTokenizerBase:
    """One token per byte, those of a family's images, and its template."""
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    named = _NAMED.get(family, {})
    special = [*_BASE, *_TOKENS[family]]
    tokenizer = byte_tokenizer(special, CHATML.replace("IMAGE", _WRITTEN[family]), extra_special_tokens=named, **roles)
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


def build_vision(
    family: str, *, seed: int = 0, spread: float = 4.0, text: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A random float32 model, whose weights are wide enough that images change its greedy tokens.

    Args:
        family: one of FAMILIES.
        seed: of the weights.
        spread: factor of the matrices; 1 for gradients.
        text: changes of the text model.
    """
    tokenizer = vision_tokenizer(family)
    ends = {
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    of_text, of_vision, _, _ = _SETTINGS[family]
    of_text = {**_TEXT, **of_text, "vocab_size": len(tokenizer), **ends, **(text or {})}
    if "out_hidden_size" in of_vision:
        of_vision = {**of_vision, "out_hidden_size": of_text["hidden_size"]}
    config = AutoConfig.for_model(
        family, text_config=of_text, vision_config=of_vision, **_whole_config(family, tokenizer), **ends
    )
    torch.manual_seed(seed)
    lm = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.dim() > 1:
                weight.mul_(spread) if weight.any() else weight.normal_(std=0.1 * spread)  # Gemma 3's projection is 0
    lm.generation_config.eos_token_id = tokenizer.eos_token_id
    lm.generation_config.pad_token_id = tokenizer.pad_token_id
    return lm  # type: ignore[no-any-return]


def save_vision(folder: Path, family: str, lm: PreTrainedModel | None = None) -> Path:
    """A model, `build_vision` by default, with tokenizer and processor files in a folder, which is returned."""
    (build_vision(family) if lm is None else lm).save_pretrained(folder)
    vision_tokenizer(family).save_pretrained(folder)
    _, _, of_images, of_processor = _SETTINGS[family]
    (folder / "preprocessor_config.json").write_text(json.dumps(of_images))
    name = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES[family]
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **of_processor}))
    return folder


@functools.cache
def vision_folder(family: str) -> Path:
    """The folder of `save_vision`, one per process; do not change it."""
    return save_vision(Path(tempfile.mkdtemp(prefix=family)), family)


@functools.cache
def vision_scorer(family: str) -> tuple[PreTrainedModel, Path]:
    """A reward model with that tower and its folder, one per process; do not change them."""
    lm, _ = load_model(str(vision_folder(family)), "scorer", config=ModelConfig(), dtype=torch.float32)
    torch.nn.init.normal_(lm.score.weight, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type,union-attr]
    return lm, save_vision(Path(tempfile.mkdtemp(prefix=family)), family, lm)


def score_of(family: str, content: Sequence[str | Image.Image], answer: str) -> float:
    """The score of a conversation by the modules of that reward model."""
    lm, _ = vision_scorer(family)
    arguments = model_arguments(family, chat_ids(family, content, answer), pictures_of(content))
    with torch.no_grad():
        return float(lm.score(backbone_of(lm)(**arguments).last_hidden_state[0, -1]))  # type: ignore[operator]


@functools.cache
def vision_processor(family: str) -> ImageProcessor:
    """The processor of that folder."""
    folder = str(vision_folder(family))
    return ImageProcessor.load(folder, load_tokenizer(folder))


def picture(seed: int, size: tuple[int, int] | None = None) -> Image.Image:
    """Random circles on a random ground, 24 to 64 pixels wide and high by default."""
    rng = random.Random(seed)
    width, height = size or (rng.choice([24, 32, 48, 64]), rng.choice([24, 32, 48, 64]))
    colour = lambda: (rng.randrange(256), rng.randrange(256), rng.randrange(256))  # noqa: E731
    image = Image.new("RGB", (width, height), colour())
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y = rng.randrange(width), rng.randrange(height)
        draw.ellipse([x, y, x + 12, y + 12], fill=colour())
    return image


def pictures_of(content: Sequence[str | Image.Image]) -> list[Image.Image]:
    """The pictures of a turn."""
    return [part for part in content if not isinstance(part, str)]


def chat_ids(family: str, content: Sequence[str | Image.Image], answer: str = "") -> list[int]:
    """Token ids of a user's turn with texts and pictures, the beginning of the answer, and the answer."""
    processor = vision_processor(family)
    tokenizer = load_tokenizer(str(vision_folder(family)))
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    first, *rest = rendered.split(processor.placeholder)
    images = pictures_of(content)
    expanded = [processor.expansion_text(*image.size) + text for image, text in zip(images, rest, strict=True)]
    return tokenizer.encode(first + "".join(expanded) + answer, add_special_tokens=False)  # type: ignore[no-any-return]


def model_arguments(family: str, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Arguments of a model of transformers for one row with images."""
    processor = vision_processor(family)
    row = torch.tensor([list(ids)])
    arguments = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    marks = (row == processor.image_token_id).long()
    if family == "gemma3":
        arguments["token_type_ids"] = marks
    elif "qwen" in family or "glm" in family:
        arguments["mm_token_type_ids"] = marks
    return arguments | (processor.pixels(images) if images else {})


def row_images(family: str, images: Sequence[Image.Image]) -> list[RowImage]:
    """Images of a row as their model reads them; equal pictures have equal keys."""
    processor = vision_processor(family)
    return [processor.row_image(image, hash((image.size, image.tobytes()))) for image in images]


def padded_chats(family: str, chats: Sequence[Chat]) -> tuple[torch.Tensor, torch.Tensor, Images]:
    """Rows of a turn and its answer: ids [B, T], mask [B, T] and images."""
    rows = [torch.tensor(chat_ids(family, content, answer)) for content, answer in chats]
    lengths = torch.tensor([len(row) for row in rows])
    images = [pictures_of(content) for content, _ in chats]
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    return pad_sequence(rows, batch_first=True), real, Images([row_images(family, of_row) for of_row in images])


MIXED: list[Chat] = [
    ([picture(1), "What colour?"], "red"),
    (["Hi ", picture(3), " and ", picture(4), " differ a lot, do they not? Say how."], "no"),
    (["no image"], "none at all"),
    ([picture(5, (64, 24)), "x"], ""),
    ([picture(6, (90, 60)), "yy"], "zz"),
]
"""Rows of different lengths, with none, one and two images of different sizes."""


def random_lm(family: str) -> PreTrainedModel:
    """Whose every weight matters, and gradients are of similar size."""
    return build_vision(family, spread=2.0)


def of_transformers(family: str, lm: PreTrainedModel, chats: Sequence[Chat]) -> list[Tensor]:
    """Log-probs of the tokens of each row but the first, row by row."""
    found = []
    banned = list(Policy(lm).head.convention.banned)
    for content, answer in chats:
        ids = chat_ids(family, content, answer)
        images = pictures_of(content)
        logits = lm(**model_arguments(family, ids, images)).logits[0, :-1]
        logits = logits.index_fill(1, torch.tensor(banned), -torch.inf)
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0])
    return found


def text_mask(lm: PreTrainedModel, ids: Tensor, real: Tensor) -> Tensor:
    """True on tokens that a model can sample."""
    return real & ~torch.isin(ids, torch.tensor(Policy(lm).head.convention.banned))


def require_same_gradients(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """Relative to each weight's own gradient, which a recurrence over the tokens lets cancel; rounding also leaves a
    part of the largest."""
    bound = 1e-4 if has_mixers(ours.config) else 1e-5
    expected = {name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None}
    largest = max(float(grad.norm()) for grad in expected.values())
    found = {name: weight.grad for name, weight in ours.named_parameters() if weight.grad is not None}
    assert expected.keys() == found.keys()
    assert any("vis" in name and float(grad.norm()) > 1e-4 * largest for name, grad in expected.items())
    for name, grad in expected.items():
        assert float((found[name] - grad).norm()) <= bound * float(grad.norm()) + 1e-7 * largest, name


def greedy_of_transformers(
    family: str, lm: PreTrainedModel, ids: Sequence[int], images: Sequence[Image.Image], new_tokens: int
) -> list[int]:
    """Greedy tokens after a prompt by transformers' `generate`."""
    banned = list(vision_processor(family).banned_ids)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "suppress_tokens": banned}
    return lm.generate(**model_arguments(family, ids, images), **options)[0, len(ids) :].tolist()  # type: ignore[no-any-return, operator]


def prompt_images(
    encoder: ImageEncoder, ids: Sequence[int], row: Sequence[RowImage], change: Change = lambda encoded: encoded
) -> PromptImages | None:
    """The images of a prompt, changed when they are encoded; None without one."""
    keys = [(image.key, image.tokens) for image in row]
    return PromptImages.of(ids, encoder.token_id, keys, lambda: change(encoder.encode(row, ids))) if row else None
