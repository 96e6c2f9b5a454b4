"""What is fuzzed: each reader takes any bytes, and either refuses them in one line or gives what can be used.

A target returns, or raises AssertionError for a message of several lines and for an acceptance of what is wrong. Any
other exception is a bug as well.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.data import DataConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig
from hybrid_rlhf.configs.sections.rules import Settings, section
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.runtime.command_line import parse_config, save_config

SECONDS = 5.0
"""No input may take longer."""


class SmallConfig(Settings):
    """Every kind of value that configs have, and few keys: reading all of a step takes a tenth of a second."""

    seed: int = 42
    steps: int | None = None
    plan: bool = False
    name: str = "x"
    profile_steps: list[int] = []
    parts: list[RewardComponentConfig] = []
    data: DataConfig = section()
    optimizer: OptimizerConfig = section()
    lora: LoraConfig | None = None
    zero: ZeroConfig = section()


@cache
def folder() -> Path:
    """Of this process."""
    return Path(tempfile.mkdtemp(prefix="fuzz"))


@cache
def model() -> tuple[Path, Any]:
    """A whole tiny model, and its tokenizer."""
    from tests.support.tiny import save_tiny, tiny_model, tiny_tokenizer

    place = folder() / "model"
    save_tiny(place, tiny_model())
    return place, tiny_tokenizer()


def written(name: str, data: bytes) -> Path:
    file = folder() / name
    file.write_bytes(data)
    return file


def yaml(data: bytes) -> None:
    """A config that is accepted can be saved, and reads back equal."""
    file = written("config.yaml", data)
    config = refused(lambda: parse_config(SmallConfig, ["--config", str(file)]))
    if config is not None:
        save_config(config, folder() / "saved.yaml")
        assert parse_config(SmallConfig, ["--config", str(folder() / "saved.yaml")]) == config


def command_line(data: bytes) -> None:
    """As words between line breaks, the way the system hands them over."""
    words = [word.decode("utf-8", "surrogateescape") for word in data.replace(b"\0", b"").split(b"\n")]
    if "--help" not in words and "-h" not in words:
        refused(lambda: parse_config(SmallConfig, words))


def rows(name: str, data: bytes) -> None:
    """A row that is accepted can be tokenised and stored, and its numbers are finite."""
    from hybrid_rlhf.data import encoding
    from hybrid_rlhf.data.rows.formats import read_preference_row, read_ptx_row, read_sft_row
    from hybrid_rlhf.data.rows.sources import open_source

    for place, row in (refused(lambda: list(open_source(str(written(name, data))))) or [])[:20]:
        for adapter in (read_sft_row, read_ptx_row):
            record = refused(adapter, place, row)
            encoded = record and refused(encoding.encode_conversation_row, place, record, model()[1], 64)
            for made in encoded or ():
                assert len(made["input_ids"]) == len(made["loss_mask"]) >= made["usable"]
        pair = refused(read_preference_row, place, row)
        assert pair is None or all(math.isfinite(margin) for margin in pair.margins)
        pairs = refused(encoding.encode_preference_row, place, row, model()[1], 64)
        assert pairs is None or pairs[0]["pairs"]
        labelled = refused(encoding.encode_labelled_row, place, row, model()[1], 64)
        assert labelled is None or len(labelled[0]["labels"]) == len(labelled[0]["responses"]) > 0
        prompts = refused(encoding.encode_prompt_row, place, row, model()[1], 64)
        assert prompts is None or (prompts[0]["input_ids"] and prompts[0]["columns"].encode())


def image(data: bytes) -> None:
    """An image that is accepted is small, in RGB, and reads alike again."""
    from hybrid_rlhf.data.images.references import read_reference

    read = refused(partial(read_reference, data, "image 1", folder=None, max_pixels=4096))
    assert read is None or (read.width * read.height <= 4096 and read.image().mode == "RGB")


def safetensors_header(data: bytes) -> None:
    """A file of weights with such a header, its length before it and a few bytes after it."""
    loaded("model.safetensors", len(data).to_bytes(8, "little") + data + b"\0" * 64)


def loaded(name: str, data: bytes) -> None:
    """A model with such a file loads, or is refused."""
    import torch

    from hybrid_rlhf.configs.sections.model import ModelConfig
    from hybrid_rlhf.models.pretrained.loading import load_model
    from hybrid_rlhf.models.pretrained.sources import resolve_model
    from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
    from hybrid_rlhf.runtime.world import solo_world

    whole = model()[0]
    place = folder() / "broken"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for file in whole.iterdir():
        (place / file.name).symlink_to(file)
    (place / name).unlink(missing_ok=True)
    (place / name).write_bytes(data)

    def load() -> None:
        path = resolve_model(str(place), world=solo_world(torch.device("cpu")))
        load_tokenizer(path)
        load_model(path, "causal_lm", config=ModelConfig(path=path), dtype=torch.float32)

    refused(load)


def deepspeed_json(data: bytes) -> None:
    """The user's DeepSpeed JSON."""
    from hybrid_rlhf.engines.ds_config import read_overrides

    file = written("deepspeed.json", data)
    overrides = refused(lambda: read_overrides(str(file)))
    assert overrides is None or isinstance(overrides, dict)


def manifest(data: bytes) -> None:
    """A checkpoint's manifest: as it was written, or broken."""
    from hybrid_rlhf.runtime.files.checkpoint_folder import BrokenCheckpoint, read_manifest

    file = written("manifest.json", data)
    try:
        assert read_manifest(file.parent)["format"] == 1
    except BrokenCheckpoint as reason:
        assert str(reason).isprintable()


def refused(read: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a reader; None if it rejects the input in one line with a fix."""
    try:
        return read(*arguments)
    except UserError as error:
        text = str(error)
        assert text.isprintable() and len(text) < 2000 and ": " in text, f"no line for a user: {text!r}"
        return None


TARGETS: dict[str, Callable[[bytes], None]] = {
    "yaml": yaml,
    "command_line": command_line,
    "jsonl": partial(rows, "rows.jsonl"),
    "json_list": partial(rows, "rows.json"),
    "parquet": partial(rows, "rows.parquet"),
    "deepspeed_json": deepspeed_json,
    "manifest": manifest,
    "image": image,
    "safetensors_header": safetensors_header,
    "safetensors": partial(loaded, "model.safetensors"),
    "config_json": partial(loaded, "config.json"),
    "tokenizer_config_json": partial(loaded, "tokenizer_config.json"),
    "weights_index_json": partial(loaded, "model.safetensors.index.json"),
}


def all_targets(data: bytes) -> None:
    """The first byte chooses."""
    if data:
        list(TARGETS.values())[data[0] % len(TARGETS)](data[1:])


ROWS = (
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\\ud83d\\ude00"}]}',
    '{"prompt": "q", "chosen": "a", "rejected": [{"role": "assistant", "content": "b"}], "margin": 0.5}',
    '{"prompt": "q", "responses": ["a", "b"], "ranks": [1, 2]}',
)
YAML = (
    "seed: 0x10\noptimizer: &o {lr: 1.0e-5, betas: [0.9, 0.95], eps: .1}\nlora: {alpha: .inf}\n"
    "data: {sources: [a.jsonl, {path: b, weight: 0.5}], split: [2, 4, 4], cache_dir: null}\nsteps: 1_0\n"
    "parts: [{urls: ['http://h:80/?k=${X}'], weight: !!float 1}]\nprofile_steps: [1]\nname: 2024-01-01\n"
)
SEEDS = {
    "yaml": [*YAML.splitlines(), YAML],
    "command_line": [
        "--seed\n1\n--steps=5",
        "--data.sources\n[a, {path: b, weight: 2}]",
        "--lora\n{rank: 2}\n--model.gradient_checkpointing\nyes",
    ],
    "jsonl": ["\n".join(ROWS), *ROWS],
    "json_list": [f"[{','.join(ROWS)}]"],
    "deepspeed_json": ['{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}'],
    "safetensors_header": ['{"a":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]},"__metadata__":{"format":"pt"}}'],
    "weights_index_json": ['{"metadata": {"total_size": 5}, "weight_map": {"lm_head.weight": "model.safetensors"}}'],
}


def seeds(name: str) -> list[bytes]:
    """Inputs to begin with: whole ones, which mutation breaks."""
    if name == "all":
        return [bytes([place]) + seed for place, target in enumerate(TARGETS) for seed in seeds(target)]
    if name in SEEDS:
        return [seed.encode() for seed in SEEDS[name]]
    if name == "image":
        from tests.support.vision import picture

        kinds = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
        for kind in kinds:
            picture(1, (12, 10)).save(folder() / f"seed.{kind}", kind)
        return [(folder() / f"seed.{kind}").read_bytes() for kind in kinds]
    file = model()[0] / {"safetensors": "model.safetensors"}.get(name, f"{name.removesuffix('_json')}.json")
    if name == "parquet":
        import datasets

        file = folder() / "seed.parquet"
        datasets.Dataset.from_list([{"text": "t", "margin": 1.0, "list": [1]}]).to_parquet(file)
    if name == "manifest":
        from hybrid_rlhf.runtime.files.checkpoint_folder import write_manifest

        file = folder() / "manifest.json"
        write_manifest(folder(), {"step": 3, "files": {"a": {"bytes": 1, "crc32": 2}}, "figures": {}})
    return [file.read_bytes()]
