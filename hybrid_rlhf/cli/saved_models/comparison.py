"""The report after `train`: held-out metrics before and after each step, and completions of the models side by side."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.run import StepConfig
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.data.images.references import ImageReference, tokenised_images
from hybrid_rlhf.data.rows.placing import with_written_images
from hybrid_rlhf.data.tokenized import load_prompt_data
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.generation.image_loading import PromptEncoder
from hybrid_rlhf.loop.setup import image_rules
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.world import World, default_device, default_dtype, solo_world

_SHOWN_PROMPTS = 3


def report(
    *, base_model: str | None, folders: Mapping[str, str], last: RLConfig | PreferenceStepConfig
) -> dict[str, Any]:
    """Print the metrics of the runs, greedy completions, and the command that chats with the last model.

    Args:
        base_model: model that SFT started from, if the last step started from its result; otherwise None.
        folders: folders of the runs, by step.
        last: config of the last step.

    Returns:
        the same content for programs.
    """
    console = Console(width=None if Console().is_terminal else 120)
    label = last.algorithm.name.upper()
    changes = metric_changes({name: Path(folder) for name, folder in folders.items()}, label=label)
    console.print(metrics_table(changes))
    if isinstance(last, RLConfig):
        trained = Path(last.output_dir, "actor")
        prompt_tokens = last.rollout.max_prompt_tokens
        completion_tokens = last.rollout.sampling.max_new_tokens
    else:
        trained = Path(last.output_dir)
        prompt_tokens = completion_tokens = last.data.max_length // 2
    prompts = held_out_prompts(last, max_tokens=prompt_tokens)
    start = str(last.model.path)
    before = {"start": start} if base_model is None else {"base": base_model, "SFT": start}
    models = {**before, label: str(trained)}
    texts = completions(models, prompts, last, max_tokens=completion_tokens)
    console.print(completions_table(texts))
    command = chat_command(trained, prompts[0][0])
    console.print(Text.assemble("\nChat with the model:  ", (command, "bold")), soft_wrap=True)
    return {
        "changes": [
            {"metric": change.label, "before": change.before, "after": change.after, "change": change.change}
            for change in changes
        ],
        "models": models,
        "completions": texts,
        "chat": command,
    }


def chat_command(actor: Path, prompt: list[Message]) -> str:
    """The command that chats with the actor, under the system prompt of its training data."""
    script = Path(sys.executable).with_name("hybrid-rlhf")
    if Path("inference/chat.py").is_file():
        here = Path(sys.prefix).is_relative_to(Path.cwd())
        command = f"{os.path.relpath(sys.executable) if here else 'python'} inference/chat.py"
    elif shutil.which("hybrid-rlhf") == str(script):
        command = "hybrid-rlhf chat"
    else:
        command = f"{shlex.quote(sys.executable)} -m hybrid_rlhf chat"
    system = f" --system {shlex.quote(prompt[0]['content'])}" if prompt[0]["role"] == "system" else ""
    return f"{command} {shlex.quote(str(actor))}{system}"


@dataclass(frozen=True)
class MetricChange:
    """A held-out metric before and after a step."""

    label: str
    before: float | None
    """None if only the change is defined."""
    after: float | None
    change: float
    form: str = ""
    """Format of the values."""
    change_form: str = "{:+.3f}"

    def cells(self) -> tuple[str, ...]:
        """The cells of a row of the table."""
        values = ("" if value is None else self.form.format(value) for value in (self.before, self.after))
        return self.label, *values, self.change_form.format(self.change)


_METRICS = {
    "sft": [("eval/perplexity", "SFT perplexity", "{:.1f}")],
    "reward": [("eval/accuracy", "reward accuracy on pairs", "{:.3f}")],
    "preference": [("eval/accuracy", "{} accuracy on pairs", "{:.3f}"), ("eval/margin", "{} margin", "{:+.3f}")],
    "rl": [
        ("eval/scores", "{} mean score", "{:+.3f}"),
        ("eval/kl", "{} mean KL per completion (nats)", "{:.2f}"),
        ("eval/mean_length", "{} mean completion length (tokens)", "{:.1f}"),
    ],
}
"""Held-out metrics of each step: label, in which {} is the algorithm, and format."""
_ROUNDING = 1e-6
"""Rounding of a standard deviation in float32, relative to the mean."""


def metric_changes(folders: Mapping[str, Path], *, label: str) -> list[MetricChange]:
    """Held-out metrics before and after each step that has a run; the last step is named by its algorithm."""
    changes = []
    for step, folder in folders.items():
        for metric, about, form in _METRICS[step]:
            values = _held_out(folder, metric)
            if values is None:
                continue
            before, after = values
            name = about.format(label)
            if metric == "eval/perplexity":
                changes.append(MetricChange(name, before, after, after / before - 1, form, "{:+.0%}"))
            else:
                changes.append(MetricChange(name, before, after, after - before, form))
            spread = _held_out(folder, "eval/scores_std") if metric == "eval/scores" else None
            # a single score has no deviation, and equal ones that of their rounding
            if spread is not None and spread[0] > _ROUNDING * max(1.0, abs(before)):
                in_stds = (after - before) / spread[0]
                label_of_stds = "  in standard deviations of the SFT scores"
                changes.append(MetricChange(label_of_stds, None, None, in_stds, change_form="{:+.2f}"))
    return changes


def metrics_table(changes: Sequence[MetricChange]) -> Table:
    """The changes as a table."""
    table = Table("held-out metric", "before", "after", "change", title="What changed")
    for change in changes:
        table.add_row(*change.cells())
    return table


def held_out_prompts(step: StepConfig, *, max_tokens: int) -> list[tuple[list[Message], list[ImageReference]]]:
    """A few prompts that no step was trained on, with their images."""
    world = solo_world(default_device())
    tokenizer = _tokenizer(step, world)
    data = load_prompt_data(
        step.data,
        tokenizer=tokenizer,
        seed=step.seed,
        world=world,
        max_prompt_tokens=max_tokens,
        images=image_rules(step, resolve_model(str(step.model.path), world=world), tokenizer),
    )
    rows = data.held_out if len(data.held_out) else data.train
    shown = rows.select(range(min(len(rows), _SHOWN_PROMPTS)))
    return [(json.loads(row["prompt"]), tokenised_images(row)) for row in shown]


def completions(
    models: Mapping[str, str],
    prompts: list[tuple[list[Message], list[ImageReference]]],
    step: StepConfig,
    *,
    max_tokens: int,
) -> list[dict[str, str]]:
    """Greedy completions of each prompt by each model: a mapping with `prompt` and the name of each model."""
    device = default_device()
    trusted = step.model.trust_remote_code
    tokenizer = _tokenizer(step, solo_world(device))
    texts_by_model: list[list[str]] = []
    for path in models.values():
        engine = GenerationEngine.from_pretrained(
            path, dtype=default_dtype(device), device=device, trust_remote_code=trusted
        )
        encode = PromptEncoder(tokenizer, engine.image_reader).with_references
        encoded = [encode(messages, references) for messages, references in prompts]
        sampling = SamplingParams(max_new_tokens=max_tokens, temperature=0.0, seed=0)
        sampled = engine.generate([ids for ids, _ in encoded], sampling, images=[images for _, images in encoded])
        engine.close()  # the next model needs its memory
        texts_by_model.append([text_decoder(tokenizer)(c[0].token_ids).strip() for c in sampled])
    return [
        {"prompt": with_written_images(messages)[-1].get("content", ""), **dict(zip(models, texts, strict=True))}
        for (messages, _), *texts in zip(prompts, *texts_by_model, strict=True)
    ]


def completions_table(texts: Sequence[Mapping[str, str]]) -> Table:
    """The completions as a table."""
    table = Table(*texts[0], title="Greedy completions of held-out prompts", show_lines=True)
    for row in texts:
        table.add_row(*map(Text, row.values()))  # Text, because rich reads a plain str as markup
    return table


def _tokenizer(step: StepConfig, world: World) -> PreTrainedTokenizerBase:
    """The tokenizer of the trained model."""
    return load_tokenizer(
        resolve_model(str(step.model.path), world=world),
        trust_remote_code=step.model.trust_remote_code,
        chat_template=step.data.chat_template,
        chat_template_kwargs=step.data.chat_template_kwargs,
    )


def _held_out(folder: Path, name: str) -> tuple[float, float] | None:
    """First and last value of a held-out metric; None if it was logged less than twice."""
    values: list[Any] = [line[name] for line in read_metrics(folder) if name in line]
    return (values[0], values[-1]) if len(values) >= 2 else None
