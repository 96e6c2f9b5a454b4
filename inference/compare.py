"""What the steps changed: figures of their runs, and answers of the base, SFT and last models side by side."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.sections import StepConfig
from hybrid_rlhf.data.chat import encode_prompt
from hybrid_rlhf.data.messages import Message
from hybrid_rlhf.data.tokenized import load_prompt_data
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.metrics import read_metrics
from hybrid_rlhf.runtime.world import World, default_device, default_dtype, solo_world

_SHOWN_PROMPTS = 3


@dataclass(frozen=True)
class LastStep:
    """What the last step learned, and how it is shown."""

    label: str
    start: str
    """The model that it began with."""
    model: str
    """The one that it left."""
    config: StepConfig
    prompt_tokens: int
    """Longest prompt."""
    answer_tokens: int
    """Longest answer."""

    @classmethod
    def of(cls, config: PPOConfig | PreferenceStepConfig) -> LastStep:
        """Of a step's config."""
        label, folder = config.algorithm.upper(), Path(config.output_dir)
        if isinstance(config, PPOConfig):
            rollout, start = config.rollout, str(config.actor.path)
            return cls(label, start, str(folder / "actor"), config, rollout.max_prompt_tokens, rollout.max_new_tokens)
        length = config.data.max_length
        return cls(label, str(config.model.path), str(folder), config, length // 2, length // 2)


def report(*, base_model: str | None, folders: Mapping[str, str], last: PPOConfig | PreferenceStepConfig) -> None:
    """Print the figures of the runs in some folders, the answers, and the command to type next.

    Args:
        base_model: that the last step's SFT model was made from; none: it started from another.
        folders: of the runs, by step.
        last: config of the last step.
    """
    console = Console(width=None if Console().is_terminal else 120)
    step = LastStep.of(last)
    console.print(figures({name: Path(folder) for name, folder in folders.items()}, label=step.label))
    prompts = held_out_prompts(step)
    before = {"start": step.start} if base_model is None else {"base": base_model, "SFT": step.start}
    console.print(answers({**before, step.label: step.model}, prompts, step))
    command = chat_command(Path(step.model), prompts[0])
    console.print(Text.assemble("\nTalk to it:  ", (command, "bold")), soft_wrap=True)


def chat_command(actor: Path, prompt: list[Message]) -> str:
    """What to type to talk to the actor, with the system prompt that it was trained under."""
    here = Path(sys.prefix).is_relative_to(Path.cwd())
    python = os.path.relpath(sys.executable) if here else "python"
    system = f" --system {shlex.quote(prompt[0]['content'])}" if prompt[0]["role"] == "system" else ""
    return f"{python} inference/chat.py {shlex.quote(str(actor))}{system}"


def figures(folders: Mapping[str, Path], *, label: str) -> Table:
    """Held-out figures before and after each step; steps without a run are left out, the last is shown by its label."""
    table = Table("held-out figure", "before", "after", "change", title="What changed")
    for step, folder in folders.items():
        if step == "sft":
            _add(table, "SFT perplexity", _held_out(folder, "eval/perplexity"), "{:.1f}", relative=True)
        elif step == "reward":
            _add(table, "reward accuracy on pairs", _held_out(folder, "eval/accuracy"), "{:.3f}")
        elif step == "preference":
            _add(table, f"{label} accuracy on pairs", _held_out(folder, "eval/accuracy"), "{:.3f}")
            _add(table, f"{label} margin", _held_out(folder, "eval/margin"), "{:+.3f}")
        else:
            _add_scores(table, folder, label)
    return table


def _add_scores(table: Table, folder: Path, label: str) -> None:
    scores, deviation = _held_out(folder, "eval/scores"), _held_out(folder, "eval/scores_std")
    _add(table, f"{label} mean score", scores, "{:+.3f}")
    if scores and deviation:
        gain = (scores[1] - scores[0]) / max(deviation[0], 1e-8)
        table.add_row("  in deviations of the SFT scores", "", "", f"{gain:+.2f}")
    _add(table, f"{label} mean KL a completion (nats)", _held_out(folder, "eval/kl"), "{:.2f}")
    _add(table, f"{label} mean answer length (tokens)", _held_out(folder, "eval/mean_length"), "{:.1f}")


def held_out_prompts(step: LastStep) -> list[list[Message]]:
    """A few prompts that no step trained on."""
    world = solo_world(default_device())
    data = load_prompt_data(
        step.config.data, tokenizer=_tokenizer(step, world), seed=step.config.seed, world=world,
        max_prompt_tokens=step.prompt_tokens,
    )  # fmt: skip
    rows = data.held_out if len(data.held_out) else data.train
    return [json.loads(text) for text in rows[:_SHOWN_PROMPTS]["prompt"]]


def answers(models: Mapping[str, str], prompts: list[list[Message]], step: LastStep) -> Table:
    """Greedy answers of each model to each prompt."""
    device, trusted = default_device(), step.config.model.trust_remote_code
    tokenizer = _tokenizer(step, solo_world(device))
    table = Table("prompt", *models, title="Greedy answers to held-out prompts", show_lines=True)
    said: list[list[str]] = []
    for path in models.values():
        engine = GenerationEngine.from_pretrained(
            path, dtype=default_dtype(device), device=device, trust_remote_code=trusted
        )
        ids = [encode_prompt(messages, tokenizer) for messages in prompts]
        sampling = SamplingParams(max_new_tokens=step.answer_tokens, greedy=True, seed=0)
        completions = engine.generate(ids, sampling)
        engine.close()  # the next model needs its memory
        said.append([tokenizer.decode(c[0].token_ids, skip_special_tokens=True).strip() for c in completions])
    for messages, *texts in zip(prompts, *said, strict=True):
        table.add_row(
            *(Text(text) for text in (messages[-1].get("content", ""), *texts))
        )  # a plain str is read as markup
    return table


def _tokenizer(step: LastStep, world: World) -> PreTrainedTokenizerBase:
    """The actor's."""
    path = resolve_model(step.start, world=world)
    return load_tokenizer(
        path, trust_remote_code=step.config.model.trust_remote_code, chat_template=step.config.data.chat_template,
        chat_template_kwargs=step.config.data.chat_template_kwargs,
    )  # fmt: skip


def _held_out(folder: Path, name: str) -> tuple[float, float] | None:
    """A held-out metric's first and last value."""
    values: list[Any] = [line[name] for line in read_metrics(folder) if name in line]
    return (values[0], values[-1]) if len(values) >= 2 else None


def _add(table: Table, label: str, values: tuple[float, float] | None, form: str, *, relative: bool = False) -> None:
    if values is None:
        return
    before, after = values
    change = f"{(after / before - 1):+.0%}" if relative else f"{after - before:+.3f}"
    table.add_row(label, form.format(before), form.format(after), change)
