"""Images: a tiny vision-language model learns the colour, shape and number of drawn shapes by SFT, then GRPO raises
"shape?", the question that it answers worst.

python examples/shapes.py [--output_dir FOLDER] [--sft_steps 220] [--rl_steps 300]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
)

from hybrid_rlhf import RL, SFT
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.image_loading import PromptEncoder
from hybrid_rlhf.generation.sampling import SamplingParams
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 210, 50),
    "white": (245, 245, 245),
    "purple": (150, 50, 180),
}
SHAPES = ("square", "circle", "triangle")
NUMBERS = ("one", "two", "three", "four")
QUESTIONS = ("colour?", "shape?", "how many?")
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def scene(chance: random.Random) -> tuple[Image.Image, dict[str, str]]:
    """A picture of one to four equal shapes, and the answer to each question."""
    colour, shape, count = chance.choice(list(COLOURS)), chance.choice(SHAPES), chance.randint(1, 4)
    picture = Image.new("RGB", (32, 32), tuple(chance.randrange(30) for _ in range(3)))
    draw = ImageDraw.Draw(picture)
    for cell in chance.sample(range(4), count):
        x, y = 16 * (cell % 2) + chance.randint(1, 4), 16 * (cell // 2) + chance.randint(1, 4)
        size = chance.randint(8, 10)
        if shape == "square":
            draw.rectangle([x, y, x + size, y + size], fill=COLOURS[colour])
        elif shape == "circle":
            draw.ellipse([x, y, x + size, y + size], fill=COLOURS[colour])
        else:
            draw.polygon([(x, y + size), (x + size, y + size), (x + size / 2, y)], fill=COLOURS[colour])
    return picture, {"colour?": colour, "shape?": shape, "how many?": NUMBERS[count - 1]}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with one picture and one of the questions each, by turns."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        picture, answers = scene(chance)
        question = QUESTIONS[number % len(QUESTIONS)]
        made.append({"images": [picture], "prompt": question, "completion": answers[question]})
    return made


def correct(completions: Sequence[str], completion: Sequence[str], **columns: Any) -> list[float]:
    """1 for the expected answer, otherwise 0."""
    return [float(text.strip() == expected) for text, expected in zip(completions, completion, strict=True)]


def write_model(folder: Path) -> None:
    """Write a Qwen3-VL of 0.8 million random weights, which reads bytes."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    token = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    ends = {"bos_token_id": token["<|endoftext|>"], "eos_token_id": token["<|im_end|>"]}
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "vocab_size": len(tokenizer),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            **ends,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": 96,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|video_pad|>"],
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    ).save_pretrained(folder)


def accuracy(folder: Path | str, count: int = 300) -> dict[str, float]:
    """Share of right greedy answers of a saved model to each question, on pictures that no step has."""
    engine = GenerationEngine.from_pretrained(str(folder), dtype=torch.float32)
    tokenizer = load_tokenizer(str(folder))
    encode = PromptEncoder(tokenizer, engine.image_reader)
    asked = rows(count, seed=3)
    parts = [[{"type": "image", "image": row["images"][0]}, {"type": "text", "text": row["prompt"]}] for row in asked]
    prompts, images = zip(
        *(encode.conversation([{"role": "user", "content": content}]) for content in parts), strict=True
    )
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=10, temperature=0.0), images=images)
    engine.close()
    right = [
        tokenizer.decode(answer.token_ids, skip_special_tokens=True) == row["completion"]
        for row, (answer,) in zip(asked, answers, strict=True)
    ]
    by_question = {question: right[place :: len(QUESTIONS)] for place, question in enumerate(QUESTIONS)}
    return {question: sum(each) / len(each) for question, each in by_question.items()}


def shown(found: dict[str, float]) -> str:
    """Accuracies as text."""
    return ", ".join(f"{question} {share:.2f}" for question, share in found.items())


def main() -> None:
    """SFT, then GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("output/example_shapes"))
    parser.add_argument("--sft_steps", type=int, default=220)
    parser.add_argument("--rl_steps", type=int, default=300)
    options = parser.parse_args()
    start = options.output_dir / "untrained"
    write_model(start)
    data = {"eval_fraction": 0.0}
    sft = SFT(
        model={"path": str(start), "vision": "train"},
        data={"sources": rows(32 * options.sft_steps, seed=1), **data},
        output_dir=options.output_dir / "sft",
        optimizer={"lr": 1e-3},
        train={"global_batch_size": 32, "max_steps": options.sft_steps},
    ).train()
    before = accuracy(sft.models["model"])
    result = RL(
        model={"path": sft.models["model"], "vision": "train"},
        data={"sources": rows(32 * options.rl_steps, seed=2), **data},
        output_dir=options.output_dir / "grpo",
        algorithm={"name": "grpo", "mini_batches": 1, "kl": {"coef": 0.1}},
        reward=correct,
        rollout={"prompts_per_step": 32, "sampling": {"n": 8, "max_new_tokens": 10}},
        actor={"optimizer": {"lr": 1.5e-4}},
        train={"max_steps": options.rl_steps},
    ).train()
    print(f"after SFT: {shown(before)}")
    print(f"after GRPO: {shown(accuracy(result.models['actor']))}, model in {result.models['actor']}")


if __name__ == "__main__":
    main()
