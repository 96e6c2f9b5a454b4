"""The page of generation benchmarks: runs `benchmarks.generation` in every scenario, and writes the page.

python -m benchmarks.generation_page --measure --vllm_python ENV/bin/python   # about half an hour, on an idle machine
python -m benchmarks.generation_page                                          # the page again, from the raw results
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RAW = ROOT / "docs" / "benchmarks" / "raw"
PAGE = ROOT / "docs" / "benchmarks" / "generation.md"
ENGINE = "this engine"
FAMILIES = ("small", "small-gemma3", "small-olmo2", "small-glm4", "small-qwen3.5", "small-moe")
_RAGGED = ("--scenario", "ragged", "--requests", "64", "--new_tokens", "128")
_CACHED = ("--requests", "16", "--prompt_tokens", "256", "--new_tokens", "1", "--peers", "--cached")


@dataclass(frozen=True)
class Run:
    """One call of `benchmarks.generation`."""

    name: str
    options: tuple[str, ...]
    vllm: bool = False
    """Beside vLLM, if an environment is given."""

    @property
    def file(self) -> Path:
        """Its raw times."""
        return RAW / f"generation_{self.name}_cpu.json"

    @property
    def command(self) -> str:
        """As a user types it."""
        vllm = " --vllm_python ENV/bin/python" * self.vllm
        return f"python -m benchmarks.generation {' '.join(self.options)}{vllm}"

    def measure(self, vllm_python: str | None) -> None:
        """Run it, and keep its times."""
        vllm = ["--vllm_python", vllm_python] if self.vllm and vllm_python else []
        command = [sys.executable, "-m", "benchmarks.generation", *self.options, *vllm, "--json", str(self.file)]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True, cwd=ROOT)


PEERS = ("--peers", "generate", "generate_batch", "deepspeed")
RUNS = [
    Run("uniform", ("--onednn", "--quantization", "int8", "--runs", "2", *PEERS), vllm=True),
    Run("ragged", (*_RAGGED, "--onednn", "--runs", "5", "--peers", "generate"), vllm=True),
    Run(
        "memory",
        ("--scenario", "memory", "--requests", "64", "--new_tokens", "256", "--runs", "3", "--peers"),
    ),
    Run("cached", (*_CACHED, "--runs", "3")),
    Run("cached_qwen3.5", (*_CACHED, "--model", "small-qwen3.5", "--runs", "5")),
    Run(
        "samples",
        ("--requests", "16", "--n", "8", "--prompt_tokens", "128", "--new_tokens", "1", "--runs", "3", "--peers"),
    ),
    *(Run(model, (*_RAGGED, "--model", model, "--runs", "2")) for model in FAMILIES),
]


class Result:
    """The times of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.content: dict[str, Any] = json.loads(run.file.read_text())
        self.medians = {name: statistics.median(times) for name, times in self.content["seconds"].items()}

    def speed(self, name: str) -> float:
        """Useful tokens a second."""
        return float(self.content["useful_tokens"]) / self.medians[name]

    def ratio(self, name: str) -> float:
        """How many times as fast the engine is as another."""
        return self.medians[name] / self.medians[ENGINE]

    def table(self) -> list[str]:
        """All that ran, fastest first."""
        lines = ["| | useful tokens/s | speed of this engine relative to it |", "|---|---|---|"]
        for name in sorted(self.medians, key=self.medians.__getitem__):
            bold = "**" * (name == ENGINE)
            ratio = "" if name == ENGINE else f"{self.ratio(name):.2f}"
            lines.append(f"| {bold}{name}{bold} | {bold}{self.speed(name):.1f}{bold} | {ratio} |")
        return lines


def page(results: dict[str, Result]) -> str:
    """The page."""
    content = results["uniform"].content
    dates = sorted({result.content["date"] for result in results.values()})
    machines = sorted({result.content["machine"] for result in results.values()})
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    families = results["small"].run.command.replace("--model small", "--model MODEL")
    parts = [
        "# Generation, measured",
        "Written by `python -m benchmarks.generation_page`, from the raw times of `--measure` "
        f"(`raw/generation_*_cpu.json`). {content['dtype']}; {'; '.join(machines)}; {versions}; {' to '.join(dates)}. "
        "The rows of a table ran in turn in one process; figures are medians after a warm-up run. SmolLM2-135M, unless "
        "a section names another model.",
        '"Matrix products" runs only the matrix multiplications of the same work, in the packed form that this engine '
        'uses; "oneDNN\'s products" runs them by oneDNN. Each is an upper bound for an engine with these kernels, up '
        "to the noise of a shared machine. Prompts are not cached between runs unless a row states it. Kernels, "
        "quantisation and the weight sync: [generation in detail](generation_details.md).",
        "## Targets",
        *targets(results),
        "## Uniform",
        *section("32 prompts of 32 tokens, 32 new tokens each.", results["uniform"]),
        "## Ragged",
        *section("64 prompts of 16 to 64 tokens; lengths geometric, mean 32, limit 128.", results["ragged"]),
        "## Little cache memory",
        *section(
            "64 prompts; limits of 256 tokens, of which an eighth is used on average. `memory of 16 rows`: a cache "
            "with room for 16 rows of maximum length, in blocks; `16 rows`: slots of maximum length would decode 16 "
            "rows at a time.",
            results["memory"],
        ),
        "## Prompts sampled again",
        *section("With the same weights, 16 prompts of 256 tokens; one new token.", results["cached"]),
        *section("The same with recurrent states (a small Qwen3.5).", results["cached_qwen3.5"]),
        "## Several samples of a prompt",
        *section("A prefill of 16 prompts of 128 tokens for 8 samples each, and for one.", results["samples"]),
        "## Other families",
        "Random weights, 12 layers of width 384; the ragged work. The products of the mixture distribute tokens evenly "
        "over its 32 experts, of which each token uses 4. The gated delta net of Hugging Face uses its torch "
        "reference, as on any CPU.",
        shell(families),
        "| `--model` | matrix products | **this engine** | HF `generate` | this engine relative to `generate` |\n"
        "|---|---|---|---|---|\n" + "\n".join(family_row(results[model]) for model in FAMILIES),
        "## Pending",
        "All measurements on a GPU ([gpu.md](gpu.md)).",
    ]
    return "\n\n".join(part if part.startswith(("|", " ")) else textwrap.fill(part, 130) for part in parts) + "\n"


def section(text: str, result: Result) -> list[str]:
    """A scenario."""
    return [text, shell(result.run.command), "\n".join(result.table())]


def shell(command: str) -> str:
    """A command as a block of code."""
    return textwrap.fill(command, 110, initial_indent=" " * 4, subsequent_indent=" " * 8).replace("\n", " \\\n")


def family_row(result: Result) -> str:
    """A row of the table of families."""
    speeds = [f"{result.speed(name):.0f}" for name in ("matrix products", ENGINE, "HF generate")]
    return f"| {result.run.name} | {speeds[0]} | **{speeds[1]}** | {speeds[2]} | {result.ratio('HF generate'):.1f} |"


def targets(results: dict[str, Result]) -> list[str]:
    """What is asked for next to what was measured."""
    uniform, ragged, memory = results["uniform"], results["ragged"], results["memory"]
    slowest = min(results[model].ratio("HF generate") for model in FAMILIES)

    def of_products(result: Result) -> str:
        own, library = (result.ratio(name) for name in ("matrix products", "oneDNN's products"))
        return f"{library:.2f} of oneDNN's, {own:.2f} of this engine's own"

    rows = [
        ("uniform, relative to the matrix products", "0.88", of_products(uniform)),
        ("ragged, relative to the matrix products", "0.80", of_products(ragged)),
        ("ragged, relative to HF `generate` in six families", "2", f"{slowest:.1f} or more"),
        (
            "memory of 16 rows, relative to unlimited memory",
            "0.9",
            f"{1 / memory.ratio('memory of 16 rows'):.2f}",
        ),
        ("prompts sampled again, time", "at most 0.1", f"{results['cached'].ratio('this engine, cached'):.2f}"),
        (
            "the same with recurrent states",
            "at most 0.1",
            f"{results['cached_qwen3.5'].ratio('this engine, cached'):.2f}",
        ),
        ("int8 relative to float32, uniform", "1.5", f"{1 / uniform.ratio('this engine, int8'):.2f}"),
    ]
    if "vLLM" in ragged.medians:
        rows.insert(2, ("ragged, relative to vLLM", "1.25", f"{ragged.ratio('vLLM'):.2f}"))
    lines = [f"| {what} | {target} | **{found}** |" for what, target, found in rows]
    return ["\n".join(["| | target | measured |", "|---|---|---|", *lines])]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure if asked, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run all scenarios")
    parser.add_argument("--only", nargs="*", default=[run.name for run in RUNS], help="names of the runs to measure")
    parser.add_argument("--vllm_python", help="python of an environment with vLLM")
    options = parser.parse_args(arguments)
    for run in RUNS:
        if options.measure and run.name in options.only:
            run.measure(options.vllm_python)
    PAGE.write_text(page({run.name: Result(run) for run in RUNS}), encoding="utf-8")


if __name__ == "__main__":
    main()
