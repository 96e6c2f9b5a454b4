"""What the three steps changed: figures of their runs, and answers of the base, SFT and PPO models side by side."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.chat import encode_prompt
from hybrid_rlhf.data.rows import Message
from hybrid_rlhf.data.tokenized import load_prompt_data
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.metrics import read_metrics
from hybrid_rlhf.runtime.world import World, default_device, default_dtype, solo_world

_SHOWN_PROMPTS = 3


def report(*, base_model: str, sft: SFTConfig, reward: RewardConfig, ppo: PPOConfig) -> None:
    """Print the figures, the answers, and the command to type next."""
    console = Console(width=None if Console().is_terminal else 120)
    console.print(figures(Path(sft.output_dir), Path(reward.output_dir), Path(ppo.output_dir)))
    actor = Path(ppo.output_dir) / "actor"
    prompts = held_out_prompts(ppo)
    console.print(answers({"base": base_model, "SFT": str(ppo.actor.path), "PPO": str(actor)}, prompts, ppo))
    console.print(f"\nTalk to it:  [bold]{chat_command(actor, prompts[0])}[/bold]", soft_wrap=True)


def chat_command(actor: Path, prompt: list[Message]) -> str:
    """What to type to talk to the actor, with the system prompt that it was trained under."""
    here = Path(sys.prefix).is_relative_to(Path.cwd())
    python = os.path.relpath(sys.executable) if here else "python"
    system = f" --system {shlex.quote(prompt[0]['content'])}" if prompt[0]["role"] == "system" else ""
    return f"{python} inference/chat.py {shlex.quote(str(actor))}{system}"


def figures(sft: Path, reward: Path, ppo: Path) -> Table:
    """Held-out figures before and after each step; steps without a run are left out."""
    table = Table("held-out figure", "before", "after", "change", title="What changed")
    _add(table, "SFT perplexity", _held_out(sft, "eval/perplexity"), "{:.1f}", relative=True)
    _add(table, "reward accuracy on pairs", _held_out(reward, "eval/accuracy"), "{:.3f}")
    scores = _held_out(ppo, "eval/scores")
    _add(table, "PPO mean score", scores, "{:+.3f}")
    deviation = _held_out(ppo, "eval/scores_std")
    if scores and deviation:
        gain = (scores[1] - scores[0]) / max(deviation[0], 1e-8)
        table.add_row("  in deviations of the SFT scores", "", "", f"{gain:+.2f}")
    _add(table, "PPO mean KL a completion (nats)", _held_out(ppo, "eval/kl"), "{:.2f}")
    _add(table, "PPO mean answer length (tokens)", _held_out(ppo, "eval/mean_length"), "{:.1f}")
    return table


def held_out_prompts(ppo: PPOConfig) -> list[list[Message]]:
    """A few prompts that step 3 did not train on."""
    world = solo_world(default_device())
    tokenizer = _tokenizer(ppo, world)
    data = load_prompt_data(
        ppo.data, tokenizer=tokenizer, seed=ppo.seed, world=world, max_prompt_tokens=ppo.rollout.max_prompt_tokens
    )
    rows = data.held_out if len(data.held_out) else data.train
    return [json.loads(text) for text in rows[:_SHOWN_PROMPTS]["prompt"]]


def answers(models: dict[str, str], prompts: list[list[Message]], ppo: PPOConfig) -> Table:
    """Greedy answers of each model to each prompt."""
    device = default_device()
    tokenizer = _tokenizer(ppo, solo_world(device))
    table = Table("prompt", *models, title="Greedy answers to held-out prompts", show_lines=True)
    said: list[list[str]] = []
    for path in models.values():
        engine = GenerationEngine.from_pretrained(
            path, dtype=default_dtype(device), device=device, trust_remote_code=ppo.model.trust_remote_code
        )
        ids = [encode_prompt(messages, tokenizer) for messages in prompts]
        sampling = SamplingParams(max_new_tokens=ppo.rollout.max_new_tokens, greedy=True, seed=0)
        completions = engine.generate(ids, sampling)
        said.append([tokenizer.decode(c[0].token_ids, skip_special_tokens=True).strip() for c in completions])
    for messages, *texts in zip(prompts, *said, strict=True):
        table.add_row(messages[-1]["content"], *texts)
    return table


def _tokenizer(ppo: PPOConfig, world: World) -> PreTrainedTokenizerBase:
    """The actor's."""
    path = resolve_model(str(ppo.actor.path), world=world)
    return load_tokenizer(path, trust_remote_code=ppo.model.trust_remote_code)


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
