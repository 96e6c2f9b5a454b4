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
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from benchmarks.in_turn import ROOT, InTurn, Side, add_shared_options, environment, versions_line, words, write_result
from benchmarks.matrix_products import Products
from benchmarks.words import embedded, make_prompts
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.pretrained.sources import quiet_transformers

PHASES = ("generation", "weight_sync", "weight_check", "scoring", "training")
LEARNING_RATE = 1e-6
LIMIT, OURS, VLLM, TRL = "matrix products", "this project", "with vLLM", "TRL PPOTrainer"


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


def main() -> None:
    """Make the folders, measure all sides in turn, print a table, write JSON."""
    options = parse()
    torch.set_num_threads(options.threads)
    given = {LIMIT: True, OURS: True, VLLM: options.vllm_python, TRL: options.trl_python}
    sides, versions = {name: Side() for name, is_there in given.items() if is_there}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        law = prepare(folder, options)
        for number in range(options.rounds):
            measure_limit(sides[LIMIT], folder, law, options)
            measure_ours(sides[OURS], folder / f"ours_{number}", folder, options)
            if VLLM in sides:
                measure_ours(sides[VLLM], folder / f"vllm_{number}", folder, options, vllm_python=options.vllm_python)
            if TRL in sides:
                versions = measure_trl(sides[TRL], folder, options)
    report(options, law, sides, versions)


def prepare(folder: Path, options: argparse.Namespace) -> LengthLaw:
    """Folders actor and reward, each also as older transformers read it, and prompts.jsonl."""
    path, tokenizer = embedded()
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

    command = [sys.executable, str(ROOT / "training/step3_ppo/main.py"), "--config", str(file)]
    run = InTurn(
        command,
        log=output.with_suffix(".log"),
        progress=metrics,
        mark='"time/step_seconds"',
        environment=environment(options.threads),
    )
    try:
        for _ in range(total):
            run.update()
        run.finish()
    finally:
        run.kill()
    side.peak_gib.append(run.peak_gib)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(total + 1)), "a line a step, from step 0"
    for before, line in list(zip(lines, lines[1:], strict=False))[options.warmup :]:
        length = line["completions/mean_length"]
        parts = {name: line[f"time/{name}_seconds"] for name in PHASES}
        parts["rest"] = line["time_seconds"] - before["time_seconds"] - sum(parts.values())
        side.add(parts, tokens=options.prompts_per_step * (options.prompt_tokens + length), length=length)
        side.unfinished.append(line["completions/clipped_ratio"])
    shutil.rmtree(output)  # it holds two models


def measure_trl(side: Side, folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """TRL on the same folders, in its own environment; the versions of what ran."""
    settings = {
        "actor": folder / "actor_older",
        "reward": folder / "reward_older",
        "prompts": folder / "prompts.jsonl",
        "lr": LEARNING_RATE,
        **{
            name: getattr(options, name)
            for name in ("prompts_per_step", "new_tokens", "warmup", "steps", "threads", "seed")
        },
    }
    command = [options.trl_python, str(ROOT / "benchmarks/peers/trl_ppo.py"), *words(settings)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(options.threads), cwd=folder)
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
    side.add(parts, tokens=tokens, length=responses / prompts)


def report(options: argparse.Namespace, law: LengthLaw, sides: dict[str, Side], versions: dict[str, str]) -> None:
    """A table on the screen, and the same as JSON."""
    limit, ours, vllm, trl = (sides.get(name, Side()) for name in (LIMIT, OURS, VLLM, TRL))
    print(
        f"SmolLM2-135M, four roles, {options.prompts_per_step} prompts of {options.prompt_tokens} tokens, up to "
        f"{options.new_tokens} new; float32, CPU, {options.threads} threads, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; median of {len(ours.seconds)} steps in {options.rounds} processes"
    )
    if versions:
        print(versions_line(versions))
    print(f"length law: mean {law.mean:.1f} tokens, {law.unfinished:.0%} reach the limit")
    for name, side in sides.items():
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
    if versions:
        memory = statistics.median(trl.peak_gib) / statistics.median(ours.peak_gib)
        print(f"this project is {ours.speed / trl.speed:.2f} x as fast as TRL, which takes {memory:.2f} x its memory")
    whole = statistics.median(ours.seconds)
    for name, seconds in ours.phases.items():
        part = statistics.median(seconds)
        products = f"   products alone {statistics.median(limit.phases[name]):.2f} s" if name in limit.phases else ""
        sampled = f"   with vLLM {statistics.median(vllm.phases[name]):.2f} s" if VLLM in sides else ""
        print(f"  {name:10s} {part:8.2f} s  {part / whole:4.0%} of this project's step{products}{sampled}")
    write_result(options, versions, law=asdict(law), sides={name: asdict(side) for name, side in sides.items()})


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
    add_shared_options(parser, trl="0.24")
    parser.add_argument("--vllm_python", help="python of an environment with vLLM")
    return parser.parse_args()


if __name__ == "__main__":
    main()
