"""Guards of the house: sizes, names, frozen options, YAML that parses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_rlhf.configs.cli import dotted_keys, parse_config
from hybrid_rlhf.configs.inference import ChatConfig, GenerateConfig
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.sft import SFTConfig

ROOT = Path(__file__).parents[2]
ALGORITHMS = ROOT / "hybrid_rlhf" / "algorithms"
OPTIONS = Path(__file__).with_name("options.txt")
SOURCES = [
    *(path for folder in ("hybrid_rlhf", "training", "inference") for path in sorted((ROOT / folder).rglob("*.py"))),
    ROOT / "train.py",
]
CONFIGS = {
    "chat": ChatConfig, "generate": GenerateConfig, "pipeline": PipelineConfig, "ppo": PPOConfig,
    "preference": PreferenceStepConfig, "reward": RewardConfig, "sft": SFTConfig,
}  # fmt: skip


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_fit_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300
    for function in functions(path):
        assert (function.end_lineno or 0) - function.lineno < 60, function.name
        names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        assert "args" not in names, f"{function.name} takes a namespace"
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"bare except, line {node.lineno}"


@pytest.mark.parametrize("name", ["step1_sft", "step2_reward", "step3_ppo", "preference"])
def test_mains_are_small_and_free_of_tensors(name: str) -> None:
    text = (ROOT / "training" / name / "main.py").read_text()
    assert len(text.splitlines()) < 100
    assert "import torch" not in text


def test_algorithms_are_short_and_repeat_nothing() -> None:
    """120 lines at most, and no six of them, blank ones aside, stand in two files."""
    seen: dict[tuple[str, ...], str] = {}
    for path in sorted(path for name in ("on_policy", "preference") for path in (ALGORITHMS / name).glob("*.py")):
        whole = path.read_text().splitlines()
        assert len(whole) <= 120 or path.name in ("objectives.py", "reference.py"), "these two are parts of the loop"
        lines = [line.strip() for line in whole if line.strip()]
        for place in range(len(lines) - 5):
            block = tuple(lines[place : place + 6])
            assert seen.setdefault(block, path.name) == path.name, (path.name, seen[block], block)


def test_every_yaml_belongs_to_a_config() -> None:
    """A new file under hybrid_rlhf/configs or training needs a line here, and parses."""
    types = {"hybrid_rlhf/configs/demo.yaml": PipelineConfig}
    found = [path for folder in ("hybrid_rlhf", "training", "inference") for path in (ROOT / folder).rglob("*.yaml")]
    assert {str(path.relative_to(ROOT)) for path in found} == set(types)
    for name, config_type in types.items():
        assert parse_config(config_type, ["--config", str(ROOT / name)]) != config_type()


def test_the_demo_parses() -> None:
    config = parse_config(PipelineConfig, [], defaults=ROOT / "hybrid_rlhf" / "configs" / "demo.yaml")
    assert config.base_model == "embedded"


def test_options_are_frozen() -> None:
    found = "".join(f"{name}: {key}\n" for name, config in CONFIGS.items() for key in sorted(dotted_keys(config)))
    assert OPTIONS.read_text() == found, (
        "the options changed; if that is meant, say so in CHANGELOG.md and run: python -m tests.house.test_house"
    )


if __name__ == "__main__":
    OPTIONS.write_text(
        "".join(f"{name}: {key}\n" for name, config in CONFIGS.items() for key in sorted(dotted_keys(config)))
    )
