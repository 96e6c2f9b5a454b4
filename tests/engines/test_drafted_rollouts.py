"""Drafts in rollouts: tensor-parallel ranks agree on them, and runs have the samples and losses of runs without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.cli import rl
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.generation import Drafter, SamplingParams
from hybrid_rlhf.generation.drafting.trial import DraftTrial
from hybrid_rlhf.runtime.world import World
from tests.support.engines import PROMPTS, actor_spec
from tests.support.families import variant
from tests.support.generation import token_ids_of
from tests.support.ranks import run_main, run_ranks
from tests.support.steps import run_outputs, step_line, write_rows
from tests.support.tiny import tiny_tokenizer

PARAMS = SamplingParams(max_new_tokens=24, seed=3, n=2)


class RankClock:
    """Steps take a second, those with drafts on the second rank a hundred."""

    def __init__(self, rank: int, drafter: list[Drafter]) -> None:
        self.now, self.rank, self.drafter = 0.0, rank, drafter

    def __call__(self) -> float:
        drafting = self.drafter and self.drafter[0].trial is not None and self.drafter[0].trial.drafting
        self.now += 1.0 if self.rank == 0 else 100.0 if drafting else 1.0
        return self.now


def drafted(world: World, path: Path, tensor_parallel: int) -> dict[str, Any]:
    rollout = RolloutConfig(tensor_parallel=tensor_parallel, draft="previous")
    actor = build_actor(actor_spec(path), world, rollout=rollout)
    own: list[Drafter] = []
    drafter = Drafter("previous", clock=RankClock(world.rank, own))
    own.append(drafter)
    actor.drafter = None
    with actor.inference(stop_token_ids=()) as generation:
        plain = generation.generate(PROMPTS, PARAMS)
    actor.drafter = drafter
    told = []
    for _ in range(2):
        with actor.inference(stop_token_ids=()) as generation:
            found = generation.generate(PROMPTS, PARAMS)
        told.append((token_ids_of(found) == token_ids_of(plain), actor.work.accepted))
    assert drafter.trial is not None
    return {"tokens": token_ids_of(plain), "rollouts": told, "pays": drafter.trial.pays}


def test_tensor_parallel_ranks_draft_and_decide_together(model_folder: Path, tmp_path: Path) -> None:
    (alone,) = run_ranks(drafted, 1, tmp_path / "1", model_folder, 1)
    assert alone["rollouts"][0] == (True, 0) and alone["rollouts"][1][0], "an epoch before there is none"
    assert alone["rollouts"][1][1] > 0 and alone["pays"] is None, "perfect drafts end before the trial does"
    first, second = run_ranks(drafted, 2, tmp_path / "2", model_folder, 2)
    assert first == second and first["tokens"] == alone["tokens"]
    assert first["rollouts"] == alone["rollouts"]


def long_trial(world: World, path: Path) -> tuple[bool | None, int, bool]:
    """A rollout that is long enough for a decision."""
    actor = build_actor(actor_spec(path), world, rollout=RolloutConfig(tensor_parallel=world.size, draft="ngram"))
    own: list[Drafter] = []
    actor.drafter = Drafter("ngram", clock=RankClock(world.rank, own))
    own.append(actor.drafter)
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    with actor.inference(stop_token_ids=()) as generation:
        found = generation.generate(PROMPTS, params)
        drafts, actor.drafter = actor.drafter, None
    work = actor.work
    with actor.inference(stop_token_ids=()) as generation:
        same = token_ids_of(generation.generate(PROMPTS, params)) == token_ids_of(found)
    assert drafts.trial is not None
    return drafts.trial.pays, work.accepted, same


def test_the_slowest_rank_decides_for_all(model_folder: Path, tmp_path: Path) -> None:
    """Alone, the first rank would keep drafts: greedy completions of a random model repeat themselves."""
    ((pays, accepted, same),) = run_ranks(long_trial, 1, tmp_path / "1", model_folder)
    assert pays and accepted > 0 and same
    told = run_ranks(long_trial, 2, tmp_path / "2", model_folder)
    assert told[0] == told[1] and told[0][0] is False and told[0][2]


WAYS: dict[str, tuple[int, list[tuple[str, str]]]] = {
    "one rank": (1, []),
    "two ranks": (2, []),
    "ahead of training": (
        1,
        [
            ("--rollout.async_sampling.policy_lag", "2"),
            ("--rollout.kv_cache_gib", "0.1"),
            ("--algorithm.correction.method", "truncate"),
        ],
    ),
}
"""Ranks, and settings."""


def main(line: Sequence[str]) -> None:
    """The RL step, with drafts in every decoding step, however long it takes."""
    DraftTrial.record = lambda *_, **__: None  # type: ignore[method-assign]
    rl.main(line)


@pytest.mark.parametrize("draft", ["ngram", "previous"])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_drafts_has_the_samples_and_losses_of_one_without(
    draft: str, way: str, model_folder: Path, tmp_path: Path
) -> None:
    """GRPO over several epochs of twelve prompts, which change ranks between epochs."""
    rows = write_rows(tmp_path / "rows.jsonl")
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:12]))
    (ranks, more), results = WAYS[way], []
    for name, settings in (("plain", []), (draft, ["--rollout.draft", draft, "--rollout.draft_tokens", "3"])):
        line = step_line("ppo", tmp_path / name, model_folder, rows, *settings)
        dropped = ("--algorithm.kl.target", "--algorithm.score_scaling", "--reference.refresh_every", "--ptx.coef")
        dropped += (
            "--ptx.sources",
            "--ptx.max_length",
            "--actor.ema_decay",
            "--train.eval_every",
            "--data.max_eval_rows",
        )
        pairs = [pair for pair in zip(line[::2], line[1::2], strict=True) if pair[0] not in dropped]
        pairs += [("--algorithm", "grpo"), ("--rollout.sampling.n", "4"), ("--train.epochs", "9")]
        pairs += [("--rollout.sampling.max_new_tokens", "24"), ("--rollout.sampling.temperature", "0.05")]
        pairs += [("--actor.optimizer.lr", "1e-5"), *more]
        run_main(__name__, ranks, [word for pair in pairs for word in pair])
        results.append(run_outputs(tmp_path / name))
    plain, drafts = results
    assert [json.loads(one)["completion"] for one in drafts["samples"]] == [
        json.loads(one)["completion"] for one in plain["samples"]
    ]
    for mine, theirs in zip(drafts["metrics"][1:], plain["metrics"][1:], strict=True):
        assert set(mine) - set(theirs) == {"rollout/draft_acceptance_rate", "rollout/tokens_per_decode_step"}
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, abs=1e-4), key
        assert 0 <= mine["rollout/draft_acceptance_rate"] <= 1 <= mine["rollout/tokens_per_decode_step"]
    assert max(line["rollout/draft_acceptance_rate"] for line in drafts["metrics"][1:]) > 0


def refused(world: World, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        build_actor(actor_spec(path), world, rollout=RolloutConfig(draft="ngram"))
    return str(caught.value)


def test_a_recurrent_actor_refuses_drafts(tmp_path: Path) -> None:
    for part in (variant("qwen3_5"), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "m")
    (said,) = run_ranks(refused, 1, tmp_path / "a", tmp_path / "m")
    assert said == (
        "rollout.draft ngram needs attention in every layer, got a model with recurrent layers: leave it out"
    )
