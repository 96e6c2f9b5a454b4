"""A whole PPO step side by side: training/step3_ppo/main.py, TRL's PPOTrainer, and the matrix products of the step.

    python -m benchmarks.ppo_step                                # this project and the limit
    python -m benchmarks.ppo_step --trl_python ENV/bin/python    # TRL too, see benchmarks/peers/trl_ppo.py
    python -m benchmarks.ppo_step --vllm_python ENV/bin/python   # this project with rollouts of vLLM too
    python -m benchmarks.ppo_step --prompts_per_step 4 --new_tokens 8 --steps 1 --rounds 1 --calibration 8   # a try

Actor, critic, reward and reference are SmolLM2-135M in float32 on the CPU and trained whole; one epoch, one
mini-batch, one micro-batch. Rounds run limit, this project, TRL in turn; the first steps of each process warm up;
medians over all measured steps are printed. Speeds count real tokens: prompts, and responses up to and with the stop
token. A step's seconds are those of the whole loop, from the end of one step to the end of the next.

Responses have to end by themselves, and by one law on all sides. So the head's row of a control token that prompts
never hold is replaced: it is fitted, by least squares on sampled text, to be a constant below the log-sum-exp of the
other logits, and the constant is set so that the mean length is half of the limit. That token is the eos token of the
folders that all sides load; as an input (the embedding is tied) it only ever ends a response. The lengths that each
side saw are printed beside those of the law. TRL generates and trains on all rows up to the longest, as it always does.

The limit counts matrix products of linear layers on real tokens, and nothing else:

- generation: the prompts once, then each step with the rows that are live in it; the head for each sampled token
- scoring: one forward each of reference (head on responses), reward model and critic (no head)
- training: forward and backward of actor (head on responses) and critic; a backward is two products for each forward

Each part takes the faster of torch's products and oneDNN's (benchmarks/matrix_products.py). Attention itself, norms,
activations, sampling and the optimizers are not in the limit.

The actor's old log-probs need no forward of their own here: with one epoch and one mini-batch they are those of the
training forward. The critic's values are needed before training, so it is counted twice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from benchmarks.matrix_products import Products
from hybrid_rlhf.data.chat.conversation import encode_prompt
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.pretrained.sources import quiet_transformers, resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import solo_world

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
STOP_TOKEN, PAD_TOKEN = "<repo_name>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHASES = ("generation", "weight_sync", "weight_check", "scoring", "training")
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class LengthLaw:
    """How long responses are."""

    longer: list[float]
    """Share of the responses longer than 0, 1, ... tokens, up to the limit less one."""
    unfinished: float
    """Share that the limit ends."""

    @property
    def mean(self) -> float:
        """Tokens of a response."""
        return sum(self.longer)


@dataclass
class Side:
    """What one side measured: a list holds a figure a step, peaks a figure a round."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    mean_length: list[float] = field(default_factory=list)
    unfinished: list[float] = field(default_factory=list)
    peak_gib: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Real tokens a second, the median step's."""
        return statistics.median(t / s for t, s in zip(self.tokens, self.seconds, strict=True))


def main() -> None:
    """Make the folders, measure all sides in turn, print a table, write JSON."""
    options = parse()
    torch.set_num_threads(options.threads)
    limit, ours, vllm, trl, versions = Side(), Side(), Side(), Side(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        law = prepare(folder, options)
        for number in range(options.rounds):
            measure_limit(limit, folder, law, options)
            measure_ours(ours, folder / f"ours_{number}", folder, options)
            if options.vllm_python:
                measure_ours(vllm, folder / f"vllm_{number}", folder, options, vllm_python=options.vllm_python)
            if options.trl_python:
                versions = measure_trl(trl, folder, options)
    report(
        options,
        law,
        limit,
        ours,
        vllm if options.vllm_python else None,
        trl if options.trl_python else None,
        versions,
    )


def prepare(folder: Path, options: argparse.Namespace) -> LengthLaw:
    """Folders actor and reward, each also as older transformers read it, and prompts.jsonl."""
    path = resolve_model("embedded", world=solo_world(CPU))
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token, tokenizer.pad_token = STOP_TOKEN, PAD_TOKEN
    generator = torch.Generator().manual_seed(options.seed)
    rows = make_prompts(
        tokenizer,
        options.prompts_per_step * (options.warmup + options.steps) + options.calibration,
        tokens=options.prompt_tokens,
        generator=generator,
    )
    samples, rows = rows[: options.calibration], rows[options.calibration :]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with quiet_transformers():
        lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        stop, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        law = set_stop_row(lm, stop, [row["input_ids"] for row in samples], new_tokens=options.new_tokens)
        for config in (lm.config, lm.generation_config):
            config.eos_token_id, config.pad_token_id = stop, pad
        lm.save_pretrained(folder / "actor")
        scorer = AutoModelForSequenceClassification.from_pretrained(folder / "actor", num_labels=1, dtype=torch.float32)
        with torch.no_grad():
            scorer.score.weight.normal_(std=0.01, generator=generator)
        scorer.save_pretrained(folder / "reward")
        for role in ("actor", "reward"):
            tokenizer.save_pretrained(folder / role)
            older_copy(folder / role, folder / f"{role}_older")
    return law


def plain_words(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Words of small letters that are one token behind a space."""
    return sorted(w[1:] for w in tokenizer.get_vocab() if w[0] == "Ġ" and w[1:].isascii() and w[1:].islower())


def make_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: int, *, tokens: int, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Random words in a user's turn, `tokens` long with the template: as messages and as token ids."""
    words = plain_words(tokenizer)
    count = tokens - len(encode_prompt([{"role": "user", "content": ""}], tokenizer))
    if count < 1:
        raise SystemExit(f"--prompt_tokens {tokens} leaves no room for a word: raise it by {1 - count}")
    found: list[dict[str, Any]] = []
    while len(found) < rows:
        chosen = torch.randint(len(words), (count,), generator=generator).tolist()
        messages = [{"role": "user", "content": " ".join(words[i] for i in chosen)}]
        ids = encode_prompt(messages, tokenizer)
        if len(ids) == tokens:
            found.append({"prompt": messages, "input_ids": ids})
    return found


@torch.inference_mode()
def set_stop_row(lm: PreTrainedModel, stop: int, prompts: list[list[int]], *, new_tokens: int) -> LengthLaw:
    """Write the head's row of the stop token, for a mean length of half of new_tokens; the law that it makes.

    The rows are sampled without stopping: half of them to fit, the others to set the mean and to tell the law.
    """
    engine = GenerationEngine.from_model(lm, stop_token_ids=())
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, seed=0))
    ids = torch.tensor([p + c.token_ids for p, (c,) in zip(prompts, completions, strict=True)])
    head = lm.get_output_embeddings().weight
    hidden, others = [], []
    for part in ids.split(8):
        states = lm.base_model(input_ids=part).last_hidden_state[:, len(prompts[0]) - 1 : -1]
        logits = linear(states, head)
        logits[..., stop] = -torch.inf
        hidden.append(states.double())
        others.append(logits.logsumexp(dim=-1).double())
    row, law = fit_stop_row(torch.cat(hidden), torch.cat(others), mean=new_tokens / 2)
    head[stop] = row.to(head.dtype)
    return law


def fit_stop_row(hidden: Tensor, others: Tensor, *, mean: float) -> tuple[Tensor, LengthLaw]:
    """The row [H] whose product with hidden [N, T, H] is others [N, T], the log-sum-exp, less a constant."""
    half = len(hidden) // 2
    x = hidden[:half].flatten(0, 1)
    targets = torch.stack([others[:half].flatten(), torch.ones(len(x), dtype=x.dtype)], dim=1)
    gram = x.t() @ x
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    level, constant = torch.linalg.solve(gram, x.t() @ targets).unbind(1)
    log_odds, slope = hidden[half:] @ level - others[half:], hidden[half:] @ constant

    def longer(shift: float) -> Tensor:
        goes_on = torch.sigmoid(-(log_odds + shift * slope)).cumprod(dim=1).mean(dim=0)
        return torch.cat([torch.ones(1, dtype=goes_on.dtype), goes_on])

    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(longer(middle)[:-1].sum()) > mean else (low, middle)
    shares = longer(low).tolist()
    return level + low * constant, LengthLaw(shares[:-1], shares[-1])


def older_copy(source: Path, target: Path) -> None:
    """The folder as transformers 4.57 reads it: `rope_theta` by itself."""
    shutil.copytree(source, target, copy_function=os.link)
    config = json.loads((source / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (target / "config.json").unlink()  # a link: the source's would change too
    (target / "config.json").write_text(json.dumps(config, indent=2))


def measure_ours(
    side: Side, output: Path, folder: Path, options: argparse.Namespace, *, vllm_python: str | None = None
) -> None:
    """Step 3 as a user runs it, in a process of its own; figures are read from its metrics. vLLM samples if its python
    is given."""
    total = options.warmup + options.steps
    learning = {"optimizer": {"lr": LEARNING_RATE, "schedule": "constant"}}
    config = {
        "output_dir": str(output),
        "seed": options.seed,
        "model": {"path": str(folder / "actor"), "dtype": "float32"},
        "data": {"sources": [str(folder / "prompts.jsonl")], "eval_fraction": 0.0, "cache_dir": str(folder / "cache")},
        "actor": learning,
        "critic": learning,
        "reward": {"components": [str(folder / "reward")]},
        "rollout": {
            "prompts_per_step": options.prompts_per_step,
            "max_prompt_tokens": options.prompt_tokens,
            "sampling": {"max_new_tokens": options.new_tokens, "temperature": 1.0},
            "vllm": vllm_python and {"python": vllm_python},
        },
        "algorithm": {"name": "ppo", "epochs": 1, "mini_batches": 1, "kl": {"coef": 0.05}},
        "train": {"max_steps": total, "micro_batch_size": options.prompts_per_step},
        "logging": {"sinks": [], "samples_every": 0},
    }
    file, metrics = output.with_suffix(".yaml"), output / "metrics.jsonl"
    file.write_text(json.dumps(config))  # JSON is YAML

    def trained() -> bool:
        return metrics.exists() and len(metrics.read_text().splitlines()) > total  # a line of step 0 comes first

    command = [sys.executable, str(ROOT / "training/step3_ppo/main.py"), "--config", str(file)]
    side.peak_gib.append(peak_of(command, output.with_suffix(".log"), options, until=trained))
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(total + 1)), "a line a step, from step 0"
    for before, line in list(zip(lines, lines[1:], strict=False))[options.warmup :]:
        length = line["completions/mean_length"]
        seconds = line["time_seconds"] - before["time_seconds"]
        side.seconds.append(seconds)
        side.mean_length.append(length)
        side.unfinished.append(line["completions/clipped_ratio"])
        side.tokens.append(options.prompts_per_step * (options.prompt_tokens + length))
        parts = {name: line[f"time/{name}_seconds"] for name in PHASES}
        for name, part in {**parts, "rest": seconds - sum(parts.values())}.items():
            side.phases.setdefault(name, []).append(part)
    shutil.rmtree(output)  # it holds two models


def peak_of(command: list[str], log: Path, options: argparse.Namespace, *, until: Callable[[], bool]) -> float:
    """Run a command to its end; the most memory, in GiB, that was resident up to a moment."""
    peak, watching = 0.0, True
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment(options), cwd=ROOT)
        try:
            while process.poll() is None:
                if watching:
                    peak = max(peak, peak_gib(process.pid))
                    watching = not until()
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-4000:]}")
    return peak


def peak_gib(process_id: int) -> float:
    """The most that has been resident; 0 of a process that just ended."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20 if "VmHWM:" in status else 0.0


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Of the measured processes: the CPU, and as many threads for each."""
    threads = str(options.threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def measure_trl(side: Side, folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """TRL on the same folders, in its own environment; the versions of what ran."""
    sizes = ("prompts_per_step", "new_tokens", "warmup", "steps", "threads", "seed")
    command = [
        options.trl_python,
        str(ROOT / "benchmarks/peers/trl_ppo.py"),
        "--actor",
        str(folder / "actor_older"),
        "--reward",
        str(folder / "reward_older"),
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--lr",
        str(LEARNING_RATE),
        *(part for name in sizes for part in (f"--{name}", str(getattr(options, name)))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(options), cwd=folder)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    side.peak_gib.append(result["peak_gib"])
    for name in ("seconds", "tokens", "mean_length", "unfinished"):
        getattr(side, name).extend(result[name])
    return dict(result["versions"])


@torch.inference_mode()
def measure_limit(side: Side, folder: Path, law: LengthLaw, options: argparse.Namespace) -> None:
    """The products of a step whose lengths follow the law; sizes are (tokens, of these with the head)."""
    prompts = options.prompts_per_step
    live = [rows for share in law.longer[1:] if (rows := round(prompts * share))]
    responses = prompts + sum(live)
    tokens = prompts * options.prompt_tokens + responses
    with quiet_transformers():
        lm = AutoModelForCausalLM.from_pretrained(folder / "actor", dtype=torch.float32)
    products = Products(lm, tokens, outputs=responses)
    products.times(forward=[(tokens, responses), (prompts, prompts)])  # warms up
    language, scorer = (tokens, responses), (tokens, 0)
    parts = {
        "generation": products.times(forward=[(prompts * options.prompt_tokens, prompts)]).fastest
        + products.times(forward=[(rows, rows) for rows in live]).fastest,
        "scoring": products.times(forward=[language, scorer, scorer]).fastest,
        "training": products.times(forward=[language, scorer], backward=[language, scorer]).fastest,
    }
    side.seconds.append(sum(parts.values()))
    side.tokens.append(tokens)
    side.mean_length.append(responses / prompts)
    for name, seconds in parts.items():
        side.phases.setdefault(name, []).append(seconds)


def report(
    options: argparse.Namespace,
    law: LengthLaw,
    limit: Side,
    ours: Side,
    vllm: Side | None,
    trl: Side | None,
    versions: dict[str, str],
) -> None:
    """A table on the screen, and the same as JSON."""
    print(
        f"SmolLM2-135M, four roles, {options.prompts_per_step} prompts of {options.prompt_tokens} tokens, up to "
        f"{options.new_tokens} new; float32, CPU, {options.threads} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; median of {len(ours.seconds)} steps in {options.rounds} processes"
    )
    if trl:
        print("TRL ran with " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"length law: mean {law.mean:.1f} tokens, {law.unfinished:.0%} reach the limit")
    sides = (("matrix products", limit), ("this project", ours), ("with vLLM", vllm), ("TRL PPOTrainer", trl))
    for name, side in sides:
        if side is None:
            continue
        line = (
            f"{name:16s} {side.speed:8.1f} tokens/s  {statistics.median(side.seconds):8.2f} s a step "
            f"({min(side.seconds):.2f} to {max(side.seconds):.2f})  {side.speed / limit.speed:5.0%} of the limit"
        )
        if side.peak_gib:
            line += (
                f"  peak {statistics.median(side.peak_gib):5.2f} GiB  mean length "
                f"{statistics.mean(side.mean_length):.1f}, {statistics.mean(side.unfinished):.0%} reach the limit"
            )
        print(line)
    if trl:
        memory = statistics.median(trl.peak_gib) / statistics.median(ours.peak_gib)
        print(f"this project is {ours.speed / trl.speed:.2f} x as fast as TRL, which takes {memory:.2f} x its memory")
    whole = statistics.median(ours.seconds)
    for name, seconds in ours.phases.items():
        part = statistics.median(seconds)
        products = f"   products alone {statistics.median(limit.phases[name]):.2f} s" if name in limit.phases else ""
        sampled = f"   with vLLM {statistics.median(vllm.phases[name]):.2f} s" if vllm else ""
        print(f"  {name:10s} {part:8.2f} s  {part / whole:4.0%} of this project's step{products}{sampled}")
    if options.json:
        result = {
            "options": vars(options),
            "law": asdict(law),
            "limit": asdict(limit),
            "ours": asdict(ours),
            "vllm": asdict(vllm) if vllm else None,
            "trl": asdict(trl) if trl else None,
            "platform": platform.platform(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl_versions": versions,
        }
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts_per_step", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=32, help="of each prompt, chat template included")
    parser.add_argument("--new_tokens", type=int, default=64, help="limit of a response; half of it is the mean")
    parser.add_argument("--warmup", type=int, default=1, help="steps of each process that are not measured")
    parser.add_argument("--steps", type=int, default=2, help="steps of each process that are")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turn")
    parser.add_argument("--calibration", type=int, default=128, help="responses sampled to set the length law")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl_python", help="python of an environment with TRL 0.24")
    parser.add_argument("--vllm_python", help="python of an environment with vLLM")
    parser.add_argument("--json", help="file for the raw figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
