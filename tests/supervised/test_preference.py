"""Losses on preferences against their papers in plain numbers and torch autograd; what a whole run makes of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from hybrid_rlhf.cli.preference import main
from hybrid_rlhf.configs.preference import (
    PREFERENCE_LOSSES,
    KTOConfig,
    PreferenceReferenceConfig,
    PreferenceStepConfig,
)
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import MicroBatches
from hybrid_rlhf.data.collation import collate_preferences
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.loop.batch_plan import BatchPlan
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.world import solo_world
from hybrid_rlhf.supervised.build import _warn_of_one_label
from hybrid_rlhf.supervised.preference import KTO, PAIR_LOSSES, PairLoss, PairSide, reference
from hybrid_rlhf.supervised.preference.objectives import PreferenceLabelObjective, PreferencePairObjective
from tests.support.commands import CommandLine
from tests.support.errors import refused
from tests.support.marks import faults
from tests.support.ranks import run_main
from tests.support.steps import run_outputs, words, write_lines, write_rows
from tests.support.tiny import VOCABULARY, tiny_model, tiny_tokenizer

PAIRS = 6


def pair_loss(name: str, **changes: Any) -> PairLoss:
    config = parse_config(PreferenceStepConfig, ["--algorithm", name]).algorithm
    return PAIR_LOSSES[name](replace(config, **changes))


def sides() -> tuple[PairSide, PairSide]:
    """Random pairs; the completions of the last are equally likely."""
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 9, (2, PAIRS), generator=chance)
    logprobs = -tokens * (0.5 + torch.rand(2, PAIRS, generator=chance))
    reference = logprobs + torch.randn(2, PAIRS, generator=chance)
    for values in (tokens, logprobs, reference):
        values[1, -1] = values[0, -1]
    chosen, rejected = (PairSide(logprobs[i].clone().requires_grad_(), reference[i], tokens[i]) for i in (0, 1))
    return chosen, rejected


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def paper(name: str, chosen: PairSide, rejected: PairSide, i: int, c: Any) -> float:
    """The loss of pair i, by the formula."""
    w, l = float(chosen.logprobs[i].detach()), float(rejected.logprobs[i].detach())  # noqa: E741
    rw, rl = float(chosen.ref_logprobs[i]), float(rejected.ref_logprobs[i])
    nw, nl = int(chosen.tokens[i]), int(rejected.tokens[i])
    lead = (w - rw) - (l - rl)
    odds = [math.exp(x / n) / (1 - math.exp(x / n)) for x, n in ((w, nw), (l, nl))]
    preference: float = {
        "dpo": lambda: -log_sigmoid(c.beta * lead),
        "cdpo": lambda: (
            -(1 - c.label_smoothing) * log_sigmoid(c.beta * lead) - c.label_smoothing * log_sigmoid(-c.beta * lead)
        ),
        "ipo": lambda: ((w - rw) / nw - (l - rl) / nl - 1 / (2 * c.beta)) ** 2,
        "hinge": lambda: max(0.0, 1 - c.beta * lead),
        "simpo": lambda: -log_sigmoid(c.beta * (w / nw - l / nl) - c.target_margin),
        "orpo": lambda: -c.beta * log_sigmoid(math.log(odds[0] / odds[1])),
    }[name]()
    return preference - c.sft_coef * w / nw


@pytest.mark.parametrize("name", sorted({*PREFERENCE_LOSSES} - {"kto"}))
@pytest.mark.parametrize("sft_coef", [None, 0.7])
def test_losses_are_the_papers(name: str, sft_coef: float | None) -> None:
    changes = {} if sft_coef is None else {"sft_coef": sft_coef}
    learner = pair_loss(name, **changes, **({"beta": 1.0} if name == "hinge" else {}))  # of 0.1 no pair has enough
    chosen, rejected = sides()
    found = learner(chosen, rejected)
    expected = sum(paper(name, chosen, rejected, i, learner.config) for i in range(PAIRS))
    assert found.total.item() == pytest.approx(expected, rel=1e-5)
    assert float(found.count) == PAIRS
    rewards = [
        learner.config.beta * (side.mean_logprobs if name in ("simpo", "orpo") else side.log_ratio).detach()
        for side in (chosen, rejected)
    ]
    expected_stats = {
        "accuracy": (rewards[0] > rewards[1]).float().sum(),
        "margin": (rewards[0] - rewards[1]).sum(),
        "chosen_reward": rewards[0].sum(),
        "rejected_reward": rewards[1].sum(),
        "sft": -chosen.mean_logprobs.detach().sum(),
    }
    torch.testing.assert_close(found.stats, expected_stats)
    assert not any(stat.requires_grad for stat in found.stats.values())
    # the derivative by differences, of each side's first log-prob
    gradients = torch.autograd.grad(found.total, [chosen.logprobs, rejected.logprobs])
    for place, (side, gradient) in enumerate(zip((chosen, rejected), gradients, strict=True)):
        moved = []
        for shift in (-1e-4, 1e-4):
            nudged = side.logprobs.detach().double().clone()
            nudged[0] += shift
            both = [chosen, rejected]
            both[place] = replace(side, logprobs=nudged)
            moved.append(paper(name, both[0], both[1], 0, learner.config))
        assert float(gradient[0]) == pytest.approx((moved[1] - moved[0]) / 2e-4, abs=1e-4)


def test_orpo_bounds_the_odds_of_a_completion_of_probability_1() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    even, certain = PairSide(zero - math.log(2), zero, one), PairSide(zero, zero, one)
    found = pair_loss("orpo", sft_coef=0.0)(even, certain)
    assert found.total.item() == pytest.approx(0.1 * math.log1p(1e6), rel=1e-4)


def kto_paper(log_ratio: float, good: bool, point: float, config: Any) -> float:
    if good:
        return float(config.desirable_weight * (1 - 1 / (1 + math.exp(-config.beta * (log_ratio - point)))))
    return float(config.undesirable_weight * (1 - 1 / (1 + math.exp(-config.beta * (point - log_ratio)))))


def test_kto_is_the_paper_s() -> None:
    config = parse_config(
        PreferenceStepConfig,
        "--algorithm kto --algorithm.desirable_weight 1.3 --algorithm.undesirable_weight 0.8 "
        "--algorithm.sft_coef 0.5".split(),
    ).algorithm
    assert isinstance(config, KTOConfig)
    log_ratio = torch.tensor([0.5, 0.3, 2.0, 0.4], requires_grad=True)
    mean: Tensor = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    good, point = torch.tensor([True, False, True, False]), torch.tensor(0.3)
    found = KTO(config)(log_ratio, mean_logprobs=mean, good=good, reference_point=point)
    expected = sum(kto_paper(r, g, 0.3, config) for r, g in zip(log_ratio.tolist(), good.tolist(), strict=True))
    assert found.total.item() == pytest.approx(expected + 0.5 * 1.5, rel=1e-5)
    assert float(found.count) == 4
    gradient, of_mean = torch.autograd.grad(found.total, [log_ratio, mean])
    assert (gradient[good] < 0).all() and (gradient[~good] > 0).all(), "good ones rise, bad ones fall"
    assert of_mean.tolist() == [-0.5, 0.0, -0.5, 0.0]
    told = {name: float(value) for name, value in found.stats.items()}
    assert told == pytest.approx({"accuracy": 3, "good_reward": 0.25, "bad_reward": 0.07, "good": 2, "kl": 1.2}), (
        "0.5 and 2.0 are above the point and 0.3 is not, but 0.4 is"
    )
    assert not any(stat.requires_grad or stat.dtype is not torch.float32 for stat in found.stats.values())


MISTAKES = {
    "--algorithm simpo --reference.path x": "algorithm simpo has no reference, got reference.path x: leave it out",
    "--algorithm.beta 0": "algorithm.beta must be above 0, got 0: raise it, for example to 0.1",
    "--algorithm cdpo --algorithm.label_smoothing 0.5": "algorithm.label_smoothing must be in [0, 0.5), got 0.5: lower "
    "it, for example to 0.1",
    "--algorithm.sft_coef -1": "algorithm.sft_coef must be 0 or more, got -1: raise it, for example to 0.0",
    "--algorithm ppo": "algorithm must be one of dpo, cdpo, ipo, hinge, simpo, orpo, kto, got ppo: the nearest is dpo",
}


@pytest.mark.parametrize(("line", "error"), MISTAKES.items())
def test_what_cannot_be_is_refused(line: str, error: str) -> None:
    assert refused(parse_config, PreferenceStepConfig, line.split()) == error


class TableEngine:
    """A model in which the log-prob of a token is its id times a weight."""

    world = solo_world(torch.device("cpu"))
    packs = False

    def __init__(self, weight: float = -0.1) -> None:
        self.weight = torch.tensor(weight, requires_grad=True)
        self.read: list[tuple[int, ...]] = []
        self.shares: list[list[float]] = []
        self.drop_weights = Mock()

    def __call__(self, ids: Tensor, attention: Tensor, response: Tensor, *, images: None) -> tuple[Tensor, None]:
        self.read.append(tuple(ids.shape))
        return torch.where(response & attention, self.weight * ids, 0.0), None

    def with_router_losses(self, loss: LossSum, weights: Tensor) -> LossSum:
        self.shares.append(weights.tolist())
        return loss


def completions(*tokens: Sequence[int], **columns: Any) -> dict[str, Any]:
    """A row of completions of one prompt token."""
    return {
        "responses": [[9, *ids] for ids in tokens],
        "masks": [[False, *[True] * len(ids)] for ids in tokens],
        "tokens": max(map(len, tokens)) + 1,
        **columns,
    }


ROWS = [
    completions(
        [1, 2],
        [3],
        [4, 4, 4],
        pairs=[[0, 1], [0, 2]],
        margins=[0, 0],
        labels=[True, False],
        ref_logprobs=[-1, -2, -1.9],
    ),
    None,
    completions([5], [], pairs=[[1, 0]], margins=[0], labels=[False], ref_logprobs=[-0.8, -0.5]),
]


OPTIONS: Any = {"pad_token_id": 0, "device": torch.device("cpu")}


def test_an_update_on_pairs_is_the_loss_of_their_completions() -> None:
    """Without a run: which completion is whose, of how many tokens, and what router losses weigh."""
    learner = pair_loss("ipo", sft_coef=0.5)
    engine: Any = TableEngine()
    objective = PreferencePairObjective(learner, **OPTIONS)
    (batch,) = objective.prepare(engine, [objective.collate([*ROWS, None])])
    found = objective.loss(engine, batch)
    chosen = PairSide(torch.tensor([-0.3, -0.3, 0.0]), torch.tensor([-1.0, -1.0, -0.5]), torch.tensor([2, 2, 1]))
    rejected = PairSide(torch.tensor([-0.3, -1.2, -0.5]), torch.tensor([-2.0, -1.9, -0.8]), torch.tensor([1, 3, 1]))
    expected = learner(chosen, rejected)
    torch.testing.assert_close(found.total.detach(), expected.total)
    torch.testing.assert_close(found.stats, expected.stats)
    assert engine.shares == [[1.0, 0.5, 0.5, 0.0, 0.5, 0.5, 0.0]]
    assert (objective.count(batch), int(objective.masks(batch)[0].sum())) == (3, 3 + 2 + 4 + 1 + 2 + 1 + 1)
    means = {"loss": 1.0, "accuracy": 2.0, "margin": 3.0, "chosen_reward": 4.0, "rejected_reward": 5.0, "sft": 6.0}
    assert objective.name == "preference"
    assert objective.metrics(means, "eval") == {f"eval/{name}": value for name, value in means.items()}
    live = PreferencePairObjective(learner, **OPTIONS, reference=lambda: nullcontext(cast(Any, TableEngine(-0.2))))
    (batch,) = live.prepare(engine, [live.collate(ROWS)])
    assert not batch.ref_logprobs.requires_grad
    torch.testing.assert_close(batch.ref_logprobs, -0.2 * torch.tensor([3.0, 3.0, 12.0, 0.0, 5.0, 0.0]))


def test_labels_of_one_kind_are_a_warning(log_lines: list[str]) -> None:
    """Their metrics of the other kind, 0, look like perfect ones."""
    run: Any = SimpleNamespace(world=solo_world(torch.device("cpu")))
    for labels, lines in (([[True], [False]], 0), ([[True, True], [True]], 1)):
        _warn_of_one_label(Dataset.from_dict({"labels": labels}), run)
        assert len(log_lines) == lines
    assert "all labels of the training data are True" in log_lines[0]


def test_an_update_on_labels_has_one_reference_point() -> None:
    """Without a run: a mean over the mismatched completions of all micro-batches, one of which may have none."""
    config = parse_config(PreferenceStepConfig, "--algorithm kto --algorithm.sft_coef 0.5".split()).algorithm
    assert isinstance(config, KTOConfig)
    engine: Any = TableEngine()
    objective = PreferenceLabelObjective(KTO(config), **OPTIONS)
    collated = [objective.collate(rows) for rows in (ROWS[:2], ROWS[2:], [None])]
    batches = objective.prepare(engine, collated)
    point = objective._reference_point
    assert point.item() == pytest.approx(((-1.2 + 1.9) + 0.5) / 2) and not point.requires_grad
    found = objective.loss(engine, batches[0])
    means = torch.tensor([-0.15, -0.3])
    log_ratio = torch.tensor([-0.3 + 1, -0.3 + 2])
    expected = KTO(config)(log_ratio, mean_logprobs=means, good=torch.tensor([True, False]), reference_point=point)
    torch.testing.assert_close(found.total.detach(), expected.total)
    torch.testing.assert_close(found.stats, expected.stats)
    empty = objective.loss(engine, batches[2])
    assert (empty.total.item(), empty.count.item(), empty.total.requires_grad) == (0.0, 0.0, True)
    assert engine.shares == [[1.0, 1.0], [0.0]]
    assert engine.read == [(1, 4), (1, 1), (1, 1), (2, 3), (1, 1)], "a forward is as wide as its longest completion"
    assert [objective.count(batch) for batch in batches] == [2, 1, 0]
    unlikely = completions([5], [], labels=[False], ref_logprobs=[0.0, 0.4])
    for rows, value in ((ROWS[2:], 0.5), ([unlikely], 0.0), ([None], 0.0)):
        objective.prepare(engine, [objective.collate(rows)])
        assert float(objective._reference_point) == value
    told = {"loss": 1.0, "accuracy": 0.5, "good": 0.25, "good_reward": 0.5, "bad_reward": -0.6, "kl": 0.1}
    expected_metrics = [1.0, 0.5, 2.8, 2.0, -0.8, 0.1]
    names = ["loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "kl"]
    assert list(objective.metrics(told, "eval")) == [f"eval/{name}" for name in names]
    assert list(objective.metrics(told, "eval").values()) == pytest.approx(expected_metrics)
    for share in (0.0, 1.0):
        assert objective.metrics({**told, "good": share, "good_reward": 0.0, "bad_reward": 0.0}, "")["/margin"] == 0


def test_cached_log_probs_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run: which model reads which rows, once, and when the folder of the run is believed."""
    actor: Any = TableEngine()
    other, checked = TableEngine(-0.2), Mock()
    build = Mock(return_value=other)
    monkeypatch.setattr(reference, "resolve", lambda config, run, path, key: path)
    monkeypatch.setattr(reference, "require_same_tokens", checked)
    monkeypatch.setattr(reference, "build_frozen_engine", build)
    run = Mock(world=actor.world, folder=tmp_path, checkpoint=None, warm_start=None)
    run.progress.return_value.track = iter
    train = Dataset.from_list([completions([n], [n, n]) for n in (1, 2, 3, 2)])
    held_out = Dataset.from_list([completions([1], [1, 1]), completions([7], [8])])

    config = parse_config(PreferenceStepConfig, ["--model.path", "base"])

    def read(path: str | None) -> list[list[float]]:
        section = PreferenceReferenceConfig(path=path)
        model = reference.ReferenceModel(config, section, run, actor, "actor", Mock())
        learned, held = model.with_cached_logprobs(
            train,
            held_out,
            used=[3, 0, 1],
            collate=lambda rows: collate_preferences([row and {**row, "pairs": [], "margins": []} for row in rows], 0),
            plan=BatchPlan(2, 1, MicroBatches(rows=2)),
        )
        with pytest.raises(KeyError):
            learned[2]  # no update uses it
        return [rows[n]["ref_logprobs"] for rows, n in ((learned, 0), (learned, 1), (learned, 3), (held, 0), (held, 1))]

    expected = torch.tensor([[1.0, 2], [2, 4], [2, 4], [1, 2], [7, 8]])
    # only a checkpoint makes the file in the folder this run's; the first one has none
    for path, checkpoint, forwards in (
        (None, tmp_path, 2),
        (None, tmp_path, 0),
        ("other", tmp_path, 2),
        ("other", None, 2),
        ("other", tmp_path, 0),
    ):
        run.checkpoint, engine = checkpoint, other if path else actor
        engine.read.clear()
        torch.testing.assert_close(torch.tensor(read(path)), expected * engine.weight.detach())
        assert len(engine.read) == forwards, "rows with equal completions are read once"
    assert json.loads((tmp_path / "reference_logprobs.json").read_text())["reference"] == "other"
    assert build.call_count == other.drop_weights.call_count == 2 and not actor.drop_weights.called
    assert build.call_args.args[2:] == checked.call_args.args[:2] == ("reference", "other")


def test_a_live_reference_is_the_actor_without_adapters_or_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "resolve", lambda config, run, path, key: path)
    monkeypatch.setattr(reference, "require_same_tokens", Mock())
    monkeypatch.setattr(reference, "build_frozen_engine", lambda config, run, role, path: (role, path))
    actor = Mock(reference=lambda: nullcontext("without adapters"))
    for path, lora, warm_start, expected in (
        (None, LoraConfig(), None, "without adapters"),
        (None, None, None, ("reference", "actor")),
        ("other", LoraConfig(), None, ("reference", "other")),
        (None, LoraConfig(), Path("warm"), ("reference", "base")),
    ):
        config = replace(parse_config(PreferenceStepConfig, ["--model.path", "base"]), lora=lora)
        section = PreferenceReferenceConfig(path=path, logprobs="live")
        with reference.ReferenceModel(config, section, Mock(warm_start=warm_start), actor, "actor", Mock())() as engine:
            assert engine == expected


def command_line(workspace: Path, model: Path, output: Path, *more: str) -> list[str]:
    """Settings of a run of one update on the rows of a folder."""
    line = (
        f"--model.path {model} --data.sources {workspace}/rows.jsonl --data.max_length 64 --data.max_eval_rows 4 "
        f"--data.cache_dir {workspace}/cache --logging.sinks [] --train.max_steps 1 --train.global_batch_size 8"
    )
    return words(line, f"--output_dir {output}", *more)


def start(workspace: Path, model: Path, output: Path, *more: str) -> None:
    main(command_line(workspace, model, output, *more))


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_kept_reference_says_what_a_live_one_does(name: str, tmp_path: Path, model_folder: Path) -> None:
    """The same run with log-probs read once, by a second model at each update, and gone on with after an end."""
    write_rows(tmp_path / "rows.jsonl")
    more = f"--algorithm {name} --train.max_steps 4 --optimizer.lr 1e-3 --train.save_every 2 --train.keep_last 9"
    runs = {}
    for how in ("cached", "live"):
        runs[how] = tmp_path / how
        line = command_line(tmp_path, model_folder, runs[how], more, f"--reference.logprobs {how}")
        run_main("hybrid_rlhf.cli.preference", 1, line)
    losses = [
        [told["preference/loss"] for told in run_outputs(folder)["metrics"] if told["step"]] for folder in runs.values()
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0][3] < losses[0][0]
    whole = run_outputs(runs["cached"])
    (runs["cached"] / "finished.json").unlink()
    shutil.rmtree(runs["cached"] / "checkpoints" / "step_4")
    kept = runs["cached"] / "reference_logprobs.json"
    asked = kept.stat().st_mtime_ns
    line = command_line(tmp_path, model_folder, runs["cached"], more, "--resume auto")
    run_main("hybrid_rlhf.cli.preference", 1, line)
    assert kept.stat().st_mtime_ns == asked, "the reference was not asked again"
    assert run_outputs(runs["cached"]) == whole


@pytest.mark.parametrize("name", [faults("dpo"), "kto"])
def test_the_reference_reads_only_the_rows_that_the_run_uses(name: str, tmp_path: Path, model_folder: Path) -> None:
    """16 steps need no epoch's rows; a run that is resumed for longer adds what is missing, by the first actor."""
    rows = [{"prompt": f"say {i}", "chosen": str(i), "rejected": "x" * (i % 5 + 1)} for i in range(40)]
    write_lines(tmp_path / "rows.jsonl", rows)
    line = f"--train.global_batch_size 4 --optimizer.lr 1e-2 --algorithm {name}"
    kept = {}
    for folder, steps, resume in (("run", 2, "never"), ("run", 9, "auto"), ("fresh", 9, "never")):
        (tmp_path / folder / "finished.json").unlink(missing_ok=True)
        given = f"--train.max_steps {steps} --resume {resume} --train.save_every {2 if steps == 2 else 0}"
        start(tmp_path, model_folder, tmp_path / folder, line, given)
        kept[folder, steps] = json.loads((tmp_path / folder / "reference_logprobs.json").read_text())["logprobs"]
    short, resumed, fresh = kept.values()
    assert len(short) == 2 * 4 + 2 and len(resumed) == len(fresh) == 9 * 4 + 2, "and two rows are held out"
    assert {key: resumed[key] for key in short} == short, "not read again"
    assert resumed.keys() == fresh.keys()
    for key, values in fresh.items():
        assert resumed[key] == pytest.approx(values, abs=1e-4)


def test_a_reference_of_its_own_must_share_the_tokens_and_goes_once_it_has_read(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    write_rows(tmp_path / "rows.jsonl")
    for name, tokens in (("other", 0), ("stranger", 3)):
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([f"<{token}>" for token in range(tokens)])
        tiny_model(3, vocab_size=VOCABULARY + tokens).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    for logprobs in ("cached", "live"):
        more = f"--reference.path {tmp_path}/stranger --reference.logprobs {logprobs}"
        line = command_line(tmp_path, model_folder, tmp_path / logprobs, more)
        assert "the reference must share the actor's tokens" in cli(["preference", *line]).err
    built: list[ModelEngine] = []
    inner = reference.build_frozen_engine

    def build_frozen_engine(*given: Any) -> ModelEngine:
        built.append(inner(*given))
        return built[-1]

    monkeypatch.setattr(reference, "build_frozen_engine", build_frozen_engine)
    for stage in (0, 3):
        more = f"--reference.path {tmp_path}/other --zero.stage {stage}"
        start(tmp_path, model_folder, tmp_path / f"stage_{stage}", more)
        (engine,) = built
        weights = [t for p in engine.module.parameters() for t in (p, getattr(p, "ds_tensor", p))]
        assert weights and not any(weight.numel() for weight in weights)
        built.clear()
