"""The report after `train`: held-out metrics before and after each step, and completions of the models side by side."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
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
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.data.chat.messages import Message
from hybrid_rlhf.data.tokenized import load_prompt_data
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.observability.metrics import read_metrics
from hybrid_rlhf.runtime.world import World, default_device, default_dtype, solo_world

_SHOWN_PROMPTS = 3


@dataclass(frozen=True)
class LastStep:
    """The last step of a pipeline: its models, and the limits of the completions shown."""

    label: str
    start: str
    """Model that the step started from."""
    model: str
    """Model that the step saved."""
    config: StepConfig
    prompt_tokens: int
    """Longest prompt, in tokens."""
    completion_tokens: int
    """Longest completion, in tokens."""

    @classmethod
    def of(cls, config: RLConfig | PreferenceStepConfig) -> LastStep:
        """The last step of a config."""
        label, folder = config.algorithm.name.upper(), Path(config.output_dir)
        if isinstance(config, RLConfig):
            rollout, start = config.rollout, str(config.model.path)
            return cls(
                label, start, str(folder / "actor"), config, rollout.max_prompt_tokens, rollout.sampling.max_new_tokens
            )
        length = config.data.max_length
        return cls(label, str(config.model.path), str(folder), config, length // 2, length // 2)


def report(*, base_model: str | None, folders: Mapping[str, str], last: RLConfig | PreferenceStepConfig) -> None:
    """Print the metrics of the runs, greedy completions, and the command that chats with the last model.

    Args:
        base_model: model that the SFT model of the last step started from; None: the last step started from another.
        folders: folders of the runs, by step.
        last: config of the last step.
    """
    console = Console(width=None if Console().is_terminal else 120)
    step = LastStep.of(last)
    console.print(metrics_table({name: Path(folder) for name, folder in folders.items()}, label=step.label))
    prompts = held_out_prompts(step)
    before = {"start": step.start} if base_model is None else {"base": base_model, "SFT": step.start}
    console.print(completions({**before, step.label: step.model}, prompts, step))
    command = chat_command(Path(step.model), prompts[0])
    console.print(Text.assemble("\nChat with the model:  ", (command, "bold")), soft_wrap=True)


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


def metrics_table(folders: Mapping[str, Path], *, label: str) -> Table:
    """Held-out metrics before and after each step that has a run; the last step is named by its algorithm."""
    table = Table("held-out metric", "before", "after", "change", title="What changed")
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
        table.add_row("  in standard deviations of the SFT scores", "", "", f"{gain:+.2f}")
    _add(table, f"{label} mean KL per completion (nats)", _held_out(folder, "eval/kl"), "{:.2f}")
    _add(table, f"{label} mean completion length (tokens)", _held_out(folder, "eval/mean_length"), "{:.1f}")


def held_out_prompts(step: LastStep) -> list[list[Message]]:
    """A few prompts that no step was trained on."""
    world = solo_world(default_device())
    data = load_prompt_data(
        step.config.data,
        tokenizer=_tokenizer(step, world),
        seed=step.config.seed,
        world=world,
        max_prompt_tokens=step.prompt_tokens,
    )
    rows = data.held_out if len(data.held_out) else data.train
    return [json.loads(text) for text in rows[:_SHOWN_PROMPTS]["prompt"]]


def completions(models: Mapping[str, str], prompts: list[list[Message]], step: LastStep) -> Table:
    """Greedy completions of each prompt by each model."""
    device, trusted = default_device(), step.config.model.trust_remote_code
    tokenizer = _tokenizer(step, solo_world(device))
    table = Table("prompt", *models, title="Greedy completions of held-out prompts", show_lines=True)
    texts_by_model: list[list[str]] = []
    for path in models.values():
        engine = GenerationEngine.from_pretrained(
            path, dtype=default_dtype(device), device=device, trust_remote_code=trusted
        )
        ids = [encode_prompt(messages, tokenizer) for messages in prompts]
        sampling = SamplingParams(max_new_tokens=step.completion_tokens, temperature=0.0, seed=0)
        sampled = engine.generate(ids, sampling)
        engine.close()  # the next model needs its memory
        texts_by_model.append([tokenizer.decode(c[0].token_ids, skip_special_tokens=True).strip() for c in sampled])
    for messages, *texts in zip(prompts, *texts_by_model, strict=True):
        # Text, because rich reads a plain str as markup
        table.add_row(*(Text(text) for text in (messages[-1].get("content", ""), *texts)))
    return table


def _tokenizer(step: LastStep, world: World) -> PreTrainedTokenizerBase:
    """The tokenizer of the trained model."""
    path = resolve_model(step.start, world=world)
    return load_tokenizer(
        path,
        trust_remote_code=step.config.model.trust_remote_code,
        chat_template=step.config.data.chat_template,
        chat_template_kwargs=step.config.data.chat_template_kwargs,
    )


def _held_out(folder: Path, name: str) -> tuple[float, float] | None:
    """First and last value of a held-out metric; None if it was logged less than twice."""
    values: list[Any] = [line[name] for line in read_metrics(folder) if name in line]
    return (values[0], values[-1]) if len(values) >= 2 else None


def _add(table: Table, label: str, values: tuple[float, float] | None, form: str, *, relative: bool = False) -> None:
    if values is None:
        return
    before, after = values
    change = f"{(after / before - 1):+.0%}" if relative else f"{after - before:+.3f}"
    table.add_row(label, form.format(before), form.format(after), change)
