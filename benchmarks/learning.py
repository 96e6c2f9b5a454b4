"""Does it learn? PPO runs over seeds, with curves, a band, and a table of what each guard is worth.

    python -m benchmarks.learning                              # the copy task, 5 seeds: minutes on a laptop
    python -m benchmarks.learning --ablations --seeds 0 1 2    # the copy task with one detail changed at a time
    python -m benchmarks.learning --algorithms --seeds 0 1 2   # the copy task by each on-policy algorithm
    python -m benchmarks.learning --dtypes --steps 60          # GRPO in float32, bfloat16 and, on a GPU, float16
    python -m benchmarks.learning --adapters --steps 60        # GRPO of all weights, and of adapters, also over 4 bits
    python -m benchmarks.learning --teacher --seeds 0 1 2 --steps 60    # a reward, a teacher that has learned, and both
    python -m benchmarks.learning --curriculum --seeds 0 1 2    # prompts of mixed difficulty, with and without filters
    python -m benchmarks.learning --task demo --demo output    # SmolLM2-135M, the demo's reward, three KL coefficients
    python -m benchmarks.learning --task reasoning             # SmolLM2-135M on checked answers (extra: bench)
    python -m benchmarks.learning --task reasoning --algorithms grpo dapo    # either of these two by other algorithms
    python -m benchmarks.learning --task reasoning --algorithms remax --seeds 0 1    # by one unclipped update a rollout
    python -m benchmarks.learning --task sharp --seeds 0 1     # SmolLM2-135M, defaults, a sharp reward of long answers
    python -m benchmarks.learning --samplers float32 int8 --seeds 0 1 2    # a task with rollouts in 32 and in 8 bits
    python -m benchmarks.learning --samplers lag_token lag_sequence    # a task with a lag, by each correction

Writes benchmarks/results/learning.zip with a CSV a task (a row a step: mean, deviation, lowest and highest over the
seeds, and each seed), and a PNG to docs/images where matplotlib is installed; both to --out, if given. Prints a table.
The band in which a run counts as the same is the mean of the seeds plus and minus three of their deviations.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks import results
from benchmarks.learning_tasks import (
    REASONING_TASK,
    Task,
    copy_task,
    demo_task,
    prefix_task,
    reasoning_task,
    reasoning_teacher,
    run_step,
    sharp_task,
)
from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import parse_config, save_config

IMAGES = Path(__file__).parents[1] / "docs" / "images"
ABLATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "advantages not whitened": {"algorithm": {"whiten_advantages": False}},
    "values clipped at 0.5": {"algorithm": {"value_clip": 0.5}},
    "ratios not clipped": {"algorithm": {"clip": [0.99, 1e9]}},
    "one epoch, one mini-batch": {"algorithm": {"epochs": 1, "mini_batches": 1}},
    "lambda 0": {"algorithm": {"gae_lambda": 0.0}, "critic": {"gae_lambda": 0.0}},
    "lambda 0.95": {"algorithm": {"gae_lambda": 0.95}, "critic": {"gae_lambda": 0.95}},
    "lambda 0.95 of the actor": {"algorithm": {"gae_lambda": 0.95}},
    "old log-probs off by one": {"fault": "old_logprobs_off_by_one"},
    "old log-probs renewed": {"fault": "old_logprobs_renewed"},
    "score on the last column": {"fault": "score_on_the_last_column"},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"rollout": {"quantization": "int8"}, "algorithm": {"correction": {"method": "truncate"}}},
    **{
        f"lag_{name}": {"rollout": {"max_lag": 4}, "algorithm": {"correction": correction}}
        for name, correction in {
            "token": {"ratio": "token"},
            "sequence": {"ratio": "sequence"},
            "masked": {"ratio": "sequence", "method": "mask", "clip": 3.0, "low": 0.0},
            "geometric": {"ratio": "geometric"},
        }.items()
    },
}
"""Products of the generation engine, or weights of up to four steps before, with the weights that correct the loss."""
DTYPES = ("float32", "bfloat16", *["float16"] * torch.cuda.is_available())
"""Of GRPO, with the difference of sampler and training (arXiv 2510.26788); float16 trains on a GPU only."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "lora": {"actor": {"lora": {"rank": 16}, "optimizer": {"lr": 3e-3}}},
    "qlora": {"actor": {"lora": {"rank": 16}, "optimizer": {"lr": 3e-3}}, "model": {"quantization": "nf4"}},
}
"""What trains in GRPO; embeddings and head are frozen under adapters."""
ADAPTED_STD = 0.12
"""Standard deviation of the initial weights under adapters: with 0.02 the frozen head cannot prefer a token."""
CURRICULA: dict[str, dict[str, Any]] = {
    "all prompts": {},
    "curriculum": {"rollout": {"curriculum": {}}},
    "dynamic sampling": {"algorithm": {"dynamic_sampling": {}}},
}
"""Filters of prompts: none, before sampling, after sampling."""
TEACHER_FORMS: dict[str, dict[str, Any]] = {
    "top 4, reverse": {"loss": "reverse", "top_k": 4},
    "top 4, forward": {"loss": "forward", "top_k": 4},
    "top 4, jensen_shannon": {"loss": "jensen_shannon", "top_k": 4},
    "whole, reverse": {"loss": "reverse"},
    "sampled, position_gamma 0.5": {"position_gamma": 0.5},
}
"""Other forms of the teacher's part than the sampled token's log-ratio; the task has 12 tokens."""
STEPS = {"copy": 100, "demo": 16, "reasoning": 20, "sharp": 12}
"""Steps of a task without `--steps`; the teacher of `--teacher` learns from the reward for as many."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "reinforce": {},
    "rloo": {"rollout": {"prompts_per_step": 32}},
    "reinforce_pp": {"algorithm": {"kl": None}},
    "reinforce_pp_baseline": {"rollout": {"prompts_per_step": 16}},
    "grpo": {"rollout": {"prompts_per_step": 16}},
    "dr_grpo": {"rollout": {"prompts_per_step": 16}},
    "dapo": {"rollout": {"prompts_per_step": 16}, "algorithm": {"penalties": None}},
    "gspo": {"rollout": {"prompts_per_step": 16}, "algorithm": {"clip": [0.02, 0.03]}},
    "gdpo": {"rollout": {"prompts_per_step": 16}},
    "pass_at_k": {"rollout": {"prompts_per_step": 16}},
    "vapo": {
        "rollout": {"prompts_per_step": 16, "sampling": {"n": 8}},
        "critic": {"warmup_steps": 0},
        "algorithm": {"length_alpha": 2.5},
    },
    "gmpo": {"rollout": {"prompts_per_step": 16}},
    "cispo": {"rollout": {"prompts_per_step": 16}},
    "sapo": {"rollout": {"prompts_per_step": 16}},
    "vespo": {"rollout": {"prompts_per_step": 16}},
    "online_dpo": {"rollout": {"prompts_per_step": 64}},
    "raft": {"rollout": {"prompts_per_step": 16}},
}
"""128 completions a rollout for all, with four epochs of two mini-batches. ReMax is left out: its algorithm 1 makes one
unclipped update, measured on the reasoning task. All answers of the task are as long as may be, so none is overlong;
sequences of eight tokens need a wider clip than the thousands of GSPO's paper, and a larger length_alpha
than VAPO's."""
ONE_UPDATE: dict[str, Any] = {"algorithm": {"epochs": 1, "mini_batches": 1}}
BIGGEST_GROUP = 4
"""Completions of a prompt, at most, in tasks whose rollouts are small."""
SMALL_TASK: dict[str, dict[str, Any]] = {
    "pass_at_k": {"algorithm": {"k": BIGGEST_GROUP // 2}},
    "vapo": {"algorithm": {"length_alpha": 2.5}, "critic": {"warmup_steps": 2}},
    "grpo_clip_cov": {
        "algorithm": {"name": "grpo", "entropy": {"method": "clip_cov", "share": 0.02, "bounds": [0.1, 5.0]}}
    },
    "grpo_kl_cov": {"algorithm": {"name": "grpo", "entropy": {"method": "kl_cov", "share": 0.02}}},
    "grpo_adaptive": {"algorithm": {"name": "grpo", "entropy": {"method": "adaptive", "step": 1e-3}}},
}
"""In these tasks: papers' values are for larger groups, longer answers and rollouts of many more tokens."""
SEVERAL_UPDATES = ("rloo", "online_dpo")
"""These make the task's own number of updates; ReMax and the others whose papers make one unclipped update make one."""
HIGHEST_DPO_LR = 5e-4
"""Rates above it are PPO's, whose clip bounds a step; the loss of a pair has none."""
Lines = list[dict[str, float]]
"""metrics.jsonl of a run."""
Curve = dict[int, float]
"""Step to figure."""


def run(config: Mapping[str, Any], seed: int, threads: int, *, fault: str | None = None) -> Lines:
    """One run of step 3 in a process of its own."""
    folder = Path(tempfile.mkdtemp())
    config = {
        **config,
        "seed": seed,
        "output_dir": str(folder / "run"),
        "logging": {"sinks": [], "samples_every": 0},
    }
    entry = ["training/step3_ppo/main.py"] if fault is None else ["-m", "benchmarks.learning_faults", fault]
    run_step(entry, config, folder / "ppo.yaml", threads=threads)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(folder)
    return lines


def config_of(task: Task, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A variant of a task, less what its algorithm does not read of the task's keys: PPO's critic, for example."""
    whole = merged(task.config, {key: value for key, value in changes.items() if key != "fault"})
    given = whole.get("algorithm", {})
    kind = RL_ALGORITHMS[given.get("name", "ppo")]
    known = {"name", *(declared.name for declared in fields(kind))}
    whole["algorithm"] = {key: value for key, value in given.items() if key in known}
    if not kind.needs_critic:
        whole.pop("critic", None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.yaml"
        file.write_text(yaml.safe_dump(whole))
        save_config(parse_config(RLConfig, ["--config", str(file)]), file)
        return dict(yaml.safe_load(file.read_text()))


def over_seeds(task: Task, changes: Mapping[str, Any], seeds: Sequence[int], jobs: int) -> list[Lines]:
    """A run for each seed, some at a time."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    config = config_of(task, changes)  # the parser changes directories, so not in a thread
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda seed: run(config, seed, threads, fault=changes.get("fault")), seeds))


def curve(lines: Lines, metric: str) -> Curve:
    """A metric where a run has it."""
    return {int(line["step"]): line[metric] for line in lines if metric in line}


def band(curves: Sequence[Curve]) -> list[dict[str, float]]:
    """A row a step: mean, deviation, lowest, highest, and each seed."""
    rows = []
    for step in sorted(set.intersection(*(set(curve) for curve in curves))):
        values = [curve[step] for curve in curves]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append(
            {
                "step": step,
                "mean": statistics.fmean(values),
                "std": spread,
                "lowest": min(values),
                "highest": max(values),
                **{f"run_{number}": value for number, value in enumerate(values)},
            }
        )
    return rows


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with five digits of each number."""
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()}


@contextlib.contextmanager
def picture(file: Path, size: tuple[float, float], **labels: str) -> Iterator[Any]:
    """Axes to draw on, saved at the end."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size)
    yield axes
    axes.set(**labels)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def draw(named: Mapping[str, Sequence[Mapping[str, float]]], title: str, file: Path) -> None:
    """Mean curves with their bands."""
    with picture(file, (7, 4), xlabel="step", ylabel="mean score", title=title) as axes:
        for name, rows in named.items():
            steps, means = [row["step"] for row in rows], [row["mean"] for row in rows]
            axes.plot(steps, means, label=name)
            axes.fill_between(steps, [row["lowest"] for row in rows], [row["highest"] for row in rows], alpha=0.2)


def draw_frontier(rows: Sequence[Mapping[str, Any]], title: str, file: Path) -> None:
    """Held-out score against KL from the reference after training, a point a run."""
    labels = {"xlabel": "KL from the reference, nats an answer", "ylabel": "held-out score", "title": title}
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    with picture(file, (5, 4), **labels) as axes:
        for name in dict.fromkeys(row["variant"] for row in rows):
            score, kl = (
                [row["after"] for row in rows if row["variant"] == name and row["metric"] == metric]
                for metric in metrics
            )
            axes.scatter(kl, score, label=name)
        start = statistics.fmean(row["before"] for row in rows if row["metric"] == metrics[0])
        axes.axhline(start, linestyle=":", color="grey", label="before")


def last(curves: Sequence[Curve], points: int) -> list[float]:
    """Each run's mean over its last points."""
    return [statistics.fmean([curve[step] for step in sorted(curve)[-points:]]) for curve in curves]


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("copy", "demo", "reasoning", "sharp"), default="copy")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, help="none: 100 of copy, 16 of demo, 20 of reasoning, 12 of sharp")
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument(
        "--algorithms",
        nargs="*",
        choices=sorted({*RL_ALGORITHMS, *SMALL_TASK}),
        help="the task by each of these; alone: by all but remax",
    )
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=[], help="how rollouts are sampled")
    parser.add_argument("--dtypes", action="store_true", help="GRPO in float32, bfloat16 and float16")
    parser.add_argument("--adapters", action="store_true", help="the copy task by all weights, LoRA and QLoRA")
    parser.add_argument("--teacher", nargs="*", help="by a reward, a teacher, and both; names: these forms")
    parser.add_argument("--curriculum", action="store_true", help="the copy task in mixed difficulty, by each filter")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at a time")
    parser.add_argument("--demo", type=Path, default=Path("output"), help="what `make demo` wrote")
    parser.add_argument("--out", type=Path, help="folder of learning.zip and the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        variants = variants_of(options, Path(folder))
        found, others = {}, {}
        held_out: list[dict[str, Any]] = []
        for name, (task, changes) in variants.items():
            runs = over_seeds(task, changes, options.seeds, options.jobs)
            curves = [curve(lines, task.metric) for lines in runs]
            found[name] = band(curves)
            report(name, curves, found[name], task)
            for metric in task.also:
                others[f"{name}_{metric.rpartition('/')[2]}"] = band([curve(lines, metric) for lines in runs])
            for metric in task.held_out:
                compare(metric, [curve(lines, metric) for lines in runs], task)
                held_out += [
                    {"variant": name, "metric": metric, "seed": seed, **ends(curve(lines, metric))}
                    for seed, lines in zip(options.seeds, runs, strict=True)
                ]
    named = {
        "_adapters": options.adapters,
        "_dtypes": options.dtypes,
        "_taught": options.teacher is not None,
        "_mixed": options.curriculum,
        "_ablations": options.ablations,
        "_by": options.algorithms is not None,
        "_sampled": bool(options.samplers),
    }
    title = options.task + next((suffix for suffix, chosen in named.items() if chosen), "")
    tables = {name.replace(" ", "_").replace(",", ""): rows for name, rows in (found | others).items()}
    if held_out:
        tables["held_out"] = held_out
    for name, rows in tables.items():
        results.write_csv("learning", f"{title}_{name}.csv", list(map(rounded, rows)), options.out or results.RESULTS)
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no matplotlib, so no learning_{title}.png: pip install '.[bench]'")
        return
    images = options.out or IMAGES
    if held_out and len(variants) > 1:
        draw_frontier(held_out, f"{options.task}, held-out prompts", images / f"learning_{title}_frontier.png")
    draw(found, f"{options.task}, seeds {' '.join(map(str, options.seeds))}", images / f"learning_{title}.png")


def variants_of(options: argparse.Namespace, folder: Path) -> dict[str, tuple[Task, dict[str, Any]]]:
    """What is run: a task and what is changed of its config, by name."""
    steps = options.steps or STEPS[options.task]
    names = None if options.algorithms is None else options.algorithms or list(ALGORITHMS)
    if options.task == "demo" and names is None and not options.samplers:
        return {f"kl_coef {c}": (demo_task(options.demo, steps=steps, kl_coef=c), {}) for c in (0.02, 0.05, 0.2)}
    if options.adapters:
        task = copy_task(folder, steps=steps, std=ADAPTED_STD)
        grpo = merged({"algorithm": {"name": "grpo"}}, ALGORITHMS["grpo"])
        return {name: (task, merged(grpo, changes)) for name, changes in ADAPTERS.items()}
    if options.curriculum:
        task = prefix_task(folder, steps=steps)
        return {name: (task, changes) for name, changes in CURRICULA.items()}
    if options.task == "demo":
        task = demo_task(options.demo, steps=steps)
    else:
        task = {"copy": copy_task, "sharp": sharp_task, "reasoning": reasoning_task}[options.task](folder, steps=steps)
    if options.teacher is not None:
        forms = taught(task, folder)
        return {name: forms[name] for name in options.teacher or forms}
    if options.samplers:
        return {name: (task, SAMPLERS[name]) for name in options.samplers}
    if options.dtypes:
        also = (*task.also, "rollout/logprob_abs_diff_mean", "rollout/logprob_abs_diff_max", "policy/clipfrac")
        copies = options.task == "copy"
        grpo = merged({"algorithm": {"name": "grpo"}}, ALGORITHMS["grpo"]) if copies else by_algorithm(task, "grpo")
        return {name: (replace(task, also=also), merged(grpo, {"model": {"dtype": name}})) for name in DTYPES}
    if options.task == "copy" and names is None:
        return {name: (task, change) for name, change in ABLATIONS.items() if options.ablations or not change}
    if options.task == "copy":
        return {name: (task, merged({"algorithm": {"name": name}}, ALGORITHMS.get(name, ONE_UPDATE))) for name in names}
    if names is None:
        return {"ppo" if options.task == "sharp" else REASONING_TASK: (task, {})}
    return {name: (task, by_algorithm(task, name)) for name in names}


def taught(task: Task, folder: Path) -> dict[str, tuple[Task, dict[str, Any]]]:
    """GRPO by the reward, by a teacher that has learned from it (in the reasoning task from answers, by SFT; the reward
    is logged with weight 0), by both, and by other forms of the teacher's part."""
    copies = task.optimum is not None
    grpo = merged({"algorithm": {"name": "grpo"}}, ALGORITHMS["grpo"]) if copies else by_algorithm(task, "grpo")
    (component,) = task.config["reward"]["components"]
    if copies:
        teacher = folder / "teacher"
        longer = config_of(task, merged(grpo, {"train": {"max_steps": STEPS["copy"]}}))
        run_step(["training/step3_ppo/main.py"], {**longer, "output_dir": str(teacher)}, folder / "teacher.yaml")
        lines = [json.loads(line) for line in (teacher / "metrics.jsonl").read_text().splitlines()]
        scores = [line["objective/scores"] for line in lines if "objective/scores" in line]
        print(f"teacher: {statistics.fmean(scores[-10:]):.3f} in its last ten of {len(scores)} steps", flush=True)
        path = teacher / "actor"
    else:
        path = reasoning_teacher(folder)
    logged = f"reward/{component['function'].rpartition(':')[2]}/mean"
    held_out = () if copies else (f"eval/{logged}", *task.held_out[1:])
    # half of the time of a short run is its evaluation
    config = task.config if copies else merged(task.config, {"data": {"max_eval_rows": 48}})
    task = replace(task, config=config, metric=logged, held_out=held_out)
    section = {"teacher": {"path": str(path)}}
    unweighted = {"reward": {"components": [component | {"weight": 0.0}]}}
    changes = {"reward": {}, "teacher": section | unweighted, "both": section}
    for name, form in TEACHER_FORMS.items():
        changes[name] = {"teacher": section["teacher"] | form} | unweighted
    return {name: (task, merged(grpo, change)) for name, change in changes.items()}


def by_algorithm(task: Task, name: str) -> dict[str, Any]:
    """As many completions as PPO's rollout has, in groups where the algorithm wants them; the task's own KL.

    `name`: an algorithm, or a variant of SMALL_TASK.
    """
    variant = SMALL_TASK.get(name, {})
    name = variant.get("algorithm", {}).get("name", name)
    kind = RL_ALGORITHMS[name]
    group = min(BIGGEST_GROUP, kind.defaults_elsewhere.get("rollout.sampling.n", 1))
    prompts = task.config["rollout"]["prompts_per_step"] // group
    changes = {
        "algorithm": {"name": name, "penalties": {"overlong_fraction": 0.0}}
        | ({"kl": {"where": "loss", "estimator": "k2"}} if kind.selects else {}),
        "rollout": {"prompts_per_step": prompts, "sampling": {"n": group}},
    }
    if kind.single_update and name not in SEVERAL_UPDATES:
        changes["algorithm"] |= ONE_UPDATE["algorithm"]
    if name == "online_dpo" and task.config["actor"]["optimizer"]["lr"] > HIGHEST_DPO_LR:
        changes["actor"] = {"optimizer": {"lr": HIGHEST_DPO_LR}}
    return merged(changes, variant)


def report(name: str, curves: Sequence[Curve], rows: Sequence[Mapping[str, float]], task: Task) -> None:
    """A line of the table."""
    ends = last(curves, task.end_points)
    line = f"{name:28} end {statistics.fmean(ends):6.3f} (seeds {min(ends):.3f} to {max(ends):.3f})"
    if task.optimum is not None:
        reached = [row["step"] for row in rows if row["mean"] >= 0.95 * task.optimum]
        line += f"  95% of the best at step {reached[0]:.0f}" if reached else "  never 95% of the best"
    print(line, flush=True)


def ends(held_out: Curve) -> dict[str, float]:
    """Before the first step, and after the last."""
    return {"before": held_out[min(held_out)], "after": held_out[max(held_out)]}


def compare(metric: str, curves: Sequence[Curve], task: Task) -> None:
    """A line a metric: before and after, a seed each; of an accuracy, how far apart they are in standard errors."""
    told = []
    for pair in map(ends, curves):
        text = f"{pair['before']:.3f} -> {pair['after']:.3f}"
        if task.is_accuracy and metric == task.held_out[0]:
            rows = task.config["data"]["max_eval_rows"]
            share = (pair["before"] + pair["after"]) / 2
            error = math.sqrt(2 * max(share * (1 - share), 1e-9) / rows)
            text += f" ({(pair['after'] - pair['before']) / error:+.1f} standard errors, {rows} rows)"
        told.append(text)
    print(f"  {metric:26} " + ", ".join(told), flush=True)


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with changes, section by section."""
    whole = dict(config)
    for name, value in changes.items():
        whole[name] = merged(config.get(name) or {}, value) if isinstance(value, Mapping) else value
    return whole


if __name__ == "__main__":
    main()
