"""Generated pages are whole, links lead somewhere, and commands, keys, settings and code on pages are valid."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import itertools
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import hybrid_rlhf
from benchmarks import generation_page, results
from hybrid_rlhf.cli.main import COMMANDS
from hybrid_rlhf.configs import algorithms, preference
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.schema import Layer, find_hints, resolve
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.planning.machine import sheet_of
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.output import JSON_OPTION
from hybrid_rlhf.supervised.preference.dpo import DPO
from hybrid_rlhf.supervised.preference.pair_loss import PairSide
from tests.support.commands import command_helps
from tests.support.documents import documented_metrics
from tests.support.rl import rollout_of_rows
from tests.support.runs import ROOT

METRIC_FLOORS = ("rl", "supervised", "loop", "planning", "models", "runtime/observability", "serving/training/record")
"""Folders of the library that make metrics."""
NOT_METRICS = {"application/json"}
_COMMAND = re.compile(
    r"^(?:\w+=\S+ )*(?:hybrid-rlhf (?P<name>[a-z][a-z-]*)|.*?(?P<file>train\.py|training/\w+/main\.py)"
    r"|.*?-m hybrid_rlhf\.cli\.(?P<module>\w+))(?P<rest>(?: .*)?)$"
)
_FILES = {
    "train.py": "train",
    "step1_sft": "sft",
    "step2_reward": "reward",
    "preference": "preference",
    "step3_ppo": "rl",
}
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "recipes" / "README.md",
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
LIBRARY = sorted((ROOT / "hybrid_rlhf").rglob("*.py"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of the blocks of a page: name of the command, and its words without placeholders."""
    text = page.read_text()
    fenced = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^ {4,}\S.*\n?)+", plain, re.MULTILINE)
    for line in "\n".join((*fenced, *indented)).replace("\\\n", " ").splitlines():
        found = _COMMAND.match(line.strip())
        if found is None or "==" in line:  # a line of output
            continue
        name = found["name"] or found["module"] or next(name for key, name in _FILES.items() if key in found["file"])
        words = list(
            itertools.takewhile(lambda word: word not in (">", "|"), shlex.split(found["rest"], comments=True))
        )
        yield name, [word for word in words if word not in ("...", "&")]


@functools.cache
def library_texts() -> str:
    """All texts of the library's code, of f-strings their constant parts, each on a line of its own."""
    nodes = (node for file in LIBRARY for node in ast.walk(ast.parse(file.read_text())))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@functools.cache
def configs() -> dict[str, tuple[type, list[str]]]:
    """The config of each command, and the keys that its first words give, as its help names them."""
    found = {}
    for words, document in command_helps():
        if "config" in document:
            module, _, name = document["config"].rpartition(".")
            found[" ".join(words)] = getattr(importlib.import_module(module), name), document["positional"]
    return found


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Modules that write the pages of docs/ that only the site has."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("site_hooks").GENERATED


def test_the_api_reference_has_every_public_name(generated: dict[str, ModuleType]) -> None:
    module = generated["api.md"]
    page = module.page()
    assert {name for names in module.GROUPS.values() for name in names} == set(hybrid_rlhf.__all__)
    assert all(f"### `{name}`" in page for name in hybrid_rlhf.__all__)


def test_the_list_of_keys_has_every_command(generated: dict[str, ModuleType]) -> None:
    headings = re.findall(r"^## (.*)$", generated["keys.md"].page(), re.MULTILINE)
    without_keys = {"demo", "env", "completion", "data"}
    assert set(headings) >= set(COMMANDS) - without_keys


@each_page
def test_links_lead_to_files(page: Path, generated: dict[str, ModuleType]) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
    missing = {link for link in links if not (page.parent / link).exists()}
    assert missing <= (set(generated) if page.parent == ROOT / "docs" else set())


def test_every_page_is_in_the_navigation(generated: dict[str, ModuleType]) -> None:
    found = set(re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert found == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} | set(generated)


@each_page
def test_commands_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("recipes", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "hostfile").write_text("node1 slots=8\nnode2 slots=8\n")
    monkeypatch.chdir(tmp_path)
    for name, words in commands(page):
        assert name in COMMANDS, name
        words = [word for word in words if word != JSON_OPTION]
        if {"--help", "--help-all"}.isdisjoint(words) and words:
            if name == "data":
                name, words = f"data {words[0]}", words[1:]
            kind, positional = configs()[name]
            words = ["--system" if name == "port" and word == "--from" else word for word in words]
            config = parse_config(kind, words, prog=name, positional=positional)
            if name == "rl" and any(word.startswith("output/") for word in words):
                assert config.output_dir != RLConfig().output_dir, "the demo, whose files it reads, has its run there"


@each_page
def test_blocks_are_valid(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "python"):
        code = textwrap.dedent(block)
        ast.parse(f"{{{code}}}" if code.startswith('"') else code)  # an entry of a table
    for block in blocks(page, "json"):
        json.loads(block)
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block)
        if "tflops" in content:
            (tmp_path / "sheet.yaml").write_text(block)
            sheet_of(str(tmp_path / "sheet.yaml"))
        else:
            assert any(accepts(kind, content) for kind, _ in configs().values()), block


def test_sketches_of_extensions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of extending.md, with their imports, compute what they say."""
    sketches = [block for block in blocks(ROOT / "docs" / "extending.md", "python") if "import" in block]
    names: dict[str, Any] = {}
    for block in sketches:
        added: dict[str, Any] = {"__name__": "hybrid_rlhf"}
        exec(compile(textwrap.dedent(block), "extending.md", "exec", dont_inherit=True), added)  # noqa: S102
        for name, value in added.items():
            for module in (algorithms, preference):
                monkeypatch.setattr(module, name, value, raising=name in vars(module))
        names |= added
    rollout = replace(rollout_of_rows([(5,), (5,), (5,)]), groups=torch.tensor([0, 0, 0]))
    median = names["Median"](names["MedianConfig"](scale=2.0))
    assert median.advantages(torch.tensor([[1.0], [2.0], [5.0]]), rollout).tolist() == [[-2.0], [0.0], [6.0]]
    chosen, rejected = (PairSide(torch.tensor([x]), torch.zeros(1), torch.ones(1)) for x in (2.0, 1.0))
    robust, plain = (
        kind(config).losses(chosen, rejected)
        for kind, config in (
            (names["RobustDPO"], names["RobustDPOConfig"](flip_rate=0.0)),
            (DPO, preference.DPOConfig()),
        )
    )
    torch.testing.assert_close(robust, plain)
    for config, wrong in ((names["RobustDPOConfig"], {"flip_rate": 0.5}), (names["MedianConfig"], {"scale": 0.0})):
        with pytest.raises(UserError):
            config(**wrong)
    pattern = SimpleNamespace(pattern="a+", label="pattern", weight=1.0, on_failure="stop")
    batch = SimpleNamespace(texts=SimpleNamespace(completions=["aa", "ab"]))
    assert names["PatternReward"](pattern, device=torch.device("cpu")).begin(batch)().values == [1.0, 0.0]


def accepts(kind: type, content: dict[str, Any]) -> bool:
    """Whether a config has these keys."""
    try:
        resolve(kind, [Layer(content, "page")])
    except UserError:
        return False
    return True


def test_keys_of_other_systems_become_keys_that_exist() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]* \|$", (ROOT / "docs" / "migration.md").read_text(), re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`([\w.]+)`", row)} - {"algorithm.name"}
    assert len(keys) > 45
    steps = (SFTConfig, RewardConfig, PreferenceStepConfig, RLConfig, PipelineConfig)
    assert [key for key in sorted(keys) if not any(find_hints(kind, key) for kind in steps)] == []


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([^`|]+)`", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [row for row in rows if " " in row]
    assert len(messages) > 30
    parts = [part for message in messages for part in message.split("...") if len(part) > 3]
    assert [part for part in parts if part.strip(" ") not in library_texts()] == []


def test_metrics_of_the_code_are_documented() -> None:
    """Each text of a metric's form; values in it may be anything."""
    found = {name for file in LIBRARY if in_floors(file) for name in texts(file)}
    metrics = {name for name in found if re.fullmatch(r"[a-z_]+/[a-z_*]+(/[a-z_*]+)?|\*/[a-z_]+", name)} - NOT_METRICS
    assert len(metrics) > 70
    patterns = {name: re.compile(re.escape(name).replace(r"\*", r"[\w.:/-]+")) for name in metrics}
    listed = documented_metrics()
    assert [name for name in sorted(metrics) if not any(map(patterns[name].fullmatch, listed))] == []


def in_floors(file: Path) -> bool:
    """Whether a file is in a folder that makes metrics."""
    return str(file.relative_to(ROOT / "hybrid_rlhf")).startswith(METRIC_FLOORS)


def texts(file: Path) -> set[str]:
    """The texts of a file; an asterisk stands for a value in an f-string."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    plain = {str(node.value) for node in nodes if isinstance(node, ast.Constant) and id(node) not in inside}
    return plain | {
        "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values) for node in joined
    }


def test_raw_results_are_those_that_pages_cite() -> None:
    """A page links an archive and cites members as raw: `NAME`; no link check sees a member that is missing."""
    cited: dict[str, set[str]] = {archive.stem: set() for archive in results.RESULTS.glob("*.zip")}
    for page in PAGES:
        text = page.read_text()
        lists = re.findall(r"\braw:\s+`([^`]+(?:`,\s+`[^`]+)*)`", text, re.IGNORECASE)
        for archive in set(re.findall(r"benchmarks/results/(\w+)\.zip\)", text)):
            cited[archive] |= {name for names in lists for name in re.split(r"`,\s+`", names)}
    for archive, patterns in cited.items():
        members = results.names(archive)
        assert {name for name in members if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)} == set()
        assert {pattern for pattern in patterns if not fnmatch.filter(members, pattern)} == set()


def test_archives_of_the_same_results_are_equal(tmp_path: Path) -> None:
    """Writes in another order, or of a member that was there: else an unchanged result would be a binary change."""
    for folder, order in ((tmp_path / "a", "cab"), (tmp_path / "b", "abccb")):
        for name in order:
            results.write("page", name, f"text of {name}", folder)
    assert (tmp_path / "a" / "page.zip").read_bytes() == (tmp_path / "b" / "page.zip").read_bytes()
    assert results.names("page", tmp_path / "a") == ["a", "b", "c"]


def test_the_page_of_generation_is_what_its_raw_times_give() -> None:
    results = {run.name: generation_page.Result(run) for run in generation_page.RUNS}
    assert generation_page.PAGE.read_text() == generation_page.page(results)
    for run in generation_page.RUNS:
        asked = dict(itertools.pairwise(run.options)).get("--runs")
        assert asked is None or str(results[run.name].content["options"]["runs"]) == asked


def test_tests_that_details_name_exist() -> None:
    defined = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "details.md").read_text()))
    assert len(named) > 100
    assert {name for name in named if f"def {name}(" not in defined} == set()
