"""The tables of other systems' names: every option of their releases has a row, every key of a row exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hybrid_rlhf.cli.porting.conversion import CONVERSIONS
from hybrid_rlhf.configs.parsing.other_systems import SYSTEMS, expand, system
from hybrid_rlhf.configs.parsing.schema import Layer, resolve
from hybrid_rlhf.configs.pipeline import STEPS, PipelineConfig
from tests.house.migration import PAGE, rendered

NAMES = yaml.safe_load((Path(__file__).parent / "option_names.yaml").read_text())


@pytest.fixture(scope="module")
def known() -> list[str]:
    """Keys and sections of all steps and algorithms."""
    names: set[str] = set()
    for step, variants in (("rl", "ppo grpo sapo vespo online_dpo"), ("preference", "dpo cdpo simpo orpo kto")):
        for name in variants.split():
            tree = resolve(STEPS[step], [Layer({"algorithm": name})])
            names |= {*tree.all_keys(off=True), *(section.name for section in tree.walk(off=True))}
    for kind in (STEPS["sft"], STEPS["reward"], PipelineConfig):
        tree = resolve(kind, [])
        names |= {*tree.all_keys(off=True), *(section.name for section in tree.walk(off=True))}
    return [*names, "algorithm.name"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_option_of_a_release_has_a_row(name: str) -> None:
    table = system(name)
    for step, listed in NAMES[name].items():
        for option in listed.split(", "):
            assert table.find(option, None if step == "all" else step), (option, step)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_row_leads_somewhere(name: str, known: list[str]) -> None:
    for row in system(name).rows:
        assert bool(row.keys) != bool(row.none), row.names
        assert row.by is None or row.by in CONVERSIONS, row.names
        assert len(row.keys) in (0, 1, len(row.names)) or row.by or len(row.names) == 1, row.names
        assert not [key for key in row.keys if not expand(key, known) and key != "rl"], row.names


def test_the_migration_page_has_the_tables() -> None:
    """`python -m tests.house.migration` writes it."""
    assert rendered(PAGE.read_text()) == PAGE.read_text()
