"""The reward of a rollout: the weighted sum of its components, each logged by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig, require_distinct_names
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.chat.conversation import turn_end
from hybrid_rlhf.engines.role_model import RoleModel
from hybrid_rlhf.functional.masking import spread
from hybrid_rlhf.models.families.vision import images_refused
from hybrid_rlhf.rl.images import ImagesOf
from hybrid_rlhf.rl.rewards.components import CompletionTexts, ComponentScores, RewardBatch, RewardComponent
from hybrid_rlhf.rl.rewards.endpoint import EndpointReward
from hybrid_rlhf.rl.rewards.functions import FunctionReward
from hybrid_rlhf.rl.rewards.judge import JudgeReward
from hybrid_rlhf.rl.rewards.local_model import LocalModel
from hybrid_rlhf.rl.rewards.models import AbsentReward, ModelReward, RetokenizingModelReward, tokenizes_alike
from hybrid_rlhf.rl.rewards.verifiers.component import VerifierReward
from hybrid_rlhf.rl.sharing import LocalRows
from hybrid_rlhf.rl.types import Rollout
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import World, shared_user_errors

COUNTS = ("/failures", "/dropped", "/requests", "/cached", "/failed", "/tokens")
"""Suffixes of the metrics that are counts; the others are means."""
MicroBatchesOn = Callable[[World | None], list[list[int | None]]]
_NO_TEXT = CompletionTexts([], [], {})


@dataclass(frozen=True)
class RewardReport:
    """Scores and metrics of a rollout."""

    scores: Tensor
    """[N] float32 of all rows, on every rank."""
    dropped: list[int]
    """Numbers of the rows to remove from the rollout."""
    metrics: dict[str, float]
    """reward/NAME/mean and /std of a component's scores over all ranks, before its weight; /failures and /dropped count
    completions without a valid score."""
    components: dict[str, Tensor]
    """[N] float32 by name, scores of each component before its weight; NaN where it does not apply, or fails and does
    not score 0."""


class Reward:
    """Scores completions by weighted components."""

    def __init__(self, components: Sequence[RewardComponent], world: World) -> None:
        # Models come first: their forwards run while the others work in the background.
        self._components = sorted(components, key=lambda component: component.in_background)
        self._world = world
        self._logged = len(components) > 1 or any(component.logged_alone for component in components)
        self._silent = set[str]()
        """Components that have scored none of the completions of a rollout."""
        self.packs = all(component.packs for component in components)
        """True if no component pads its micro-batches."""
        self.shares_prefixes = all(component.shares_prefixes for component in components)
        """True if all components do."""

    @torch.no_grad()
    def __call__(
        self,
        rows: LocalRows[Rollout],
        count: int,
        micro_batches: MicroBatchesOn,
        read_texts: Callable[[Rollout], CompletionTexts],
        images_of: ImagesOf = lambda rollout: None,
        *,
        may_drop_all: bool = False,
        beside: Callable[[], None] = lambda: None,
    ) -> RewardReport:
        """Score a rollout. Every rank calls, and computes its rows of the components that it has.

        Args:
            rows: rows on this rank, among them those of `self.micro_batches(micro_batches)`.
            count: number of rows over all ranks.
            micro_batches: returns this rank's rows for a component, from its ranks; None is an empty row. Each row is
                on exactly one rank, and all have the same number of micro-batches. From None, those of whole prompts.
            read_texts: returns rows as text; called only if a component of this rank reads text.
            images_of: returns the images of rows.
            may_drop_all: true if all rows may be dropped.
            beside: called after functions and endpoints have started, before any rank waits for another.

        Raises:
            UserError: on every rank, when a component whose on_failure is stop fails for a row on any rank, one fails
                for more rows than it may, or all rows are dropped and may_drop_all is false.
        """
        batches = self._batches(rows, micro_batches, read_texts, images_of)
        pending = [component.begin(batch) for component, batch in zip(self._components, batches, strict=True)]
        beside()
        scores = [finish() for finish in pending]
        values, scored, failed = self._of_all_ranks(batches, scores, count)
        self._report_failures(scores, failed, may_drop_all)
        if not may_drop_all:
            self._report_silence(scored, failed)
        dropped = self._dropped(failed)
        weights = torch.tensor([component.weight for component in self._components], dtype=torch.float32)
        return RewardReport(
            (weights[:, None] * values).sum(dim=0),
            dropped.nonzero().flatten().tolist(),
            self._metrics(values, scored.bool() & ~dropped, failed) | self._counted(scores),
            {
                component.name: torch.where(has_one | (fails & (component.on_failure == "zero")), of_rows, torch.nan)
                for component, of_rows, has_one, fails in zip(
                    self._components, values, scored.bool(), failed.bool(), strict=True
                )
            },
        )

    def _report_silence(self, scored: Tensor, failed: Tensor) -> None:
        """Warn once of each component that has failed for no completion of a rollout, but scores none."""
        for component, of_rows in zip(self._components, (scored + failed).bool(), strict=True):
            if bool(of_rows.any()) or component.name in self._silent:
                continue
            self._silent.add(component.name)
            if self._world.is_main:
                logger.warning(
                    "reward component %s gives None for all %d completions, which adds 0 to their scores: check the "
                    "columns that it reads",
                    component.name,
                    len(of_rows),
                )

    def require_columns(self, rows: Callable[[], Iterable[Mapping[str, object]]], *, has_images: bool = False) -> None:
        """Check that the data has the columns that the components need; `rows` starts to read it."""
        images = [{"images": None}] * has_images
        for component in self._components:
            component.require_columns({**row, **given} for row in rows() for given in images or [{}])

    def micro_batches(self, micro_batches: MicroBatchesOn) -> list[list[int | None]]:
        """Numbers of the rows that this rank's components read, component by component."""
        return [rows for component in self._components for rows in self._micro_batches(component, micro_batches)]

    def _micro_batches(self, component: RewardComponent, micro_batches: MicroBatchesOn) -> list[list[int | None]]:
        return micro_batches(self._ranks_of(component))

    def _ranks_of(self, component: RewardComponent) -> World | None:
        """The ranks that share rows one by one; None for whole prompts."""
        return None if component.reads_groups else component.world or self._world

    def _batches(
        self,
        rows: LocalRows[Rollout],
        micro_batches: MicroBatchesOn,
        read_texts: Callable[[Rollout], CompletionTexts],
        images_of: ImagesOf,
    ) -> list[RewardBatch]:
        """This rank's rows for each component."""
        reads_text = any(component.reads_text for component in self._components)
        reads_images = any(component.reads_images for component in self._components)
        shared: dict[tuple[int, ...] | None, RewardBatch] = {}
        batches = []
        for component in self._components:
            ranks = self._ranks_of(component)
            key = None if ranks is None else ranks.members
            if key not in shared:
                batch = RewardBatch(rows, self._micro_batches(component, micro_batches), _NO_TEXT, images_of)
                of_rank = rows(batch.numbers)
                texts = read_texts(of_rank) if reads_text else _NO_TEXT
                if reads_images:
                    texts = replace(texts, images=images_of(of_rank))
                shared[key] = replace(batch, texts=texts)
            batches.append(shared[key])
        return batches

    def _of_all_ranks(
        self, batches: Sequence[RewardBatch], scores: Sequence[ComponentScores], count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, 1 where a row has a score, and 1 where it failed, from all ranks: [components, N] float32 each."""
        table = torch.zeros(3, len(scores), count)
        for place, (batch, component_scores) in enumerate(zip(batches, scores, strict=True)):
            rows = torch.tensor(batch.numbers, dtype=torch.long)
            table[0, place, rows] = torch.tensor([value or 0.0 for value in component_scores.values])
            table[1, place, rows] = torch.tensor([float(value is not None) for value in component_scores.values])
            table[2, place, rows[list(component_scores.failures)]] = 1.0
        # Each row is set on one rank and is zero on the others.
        values, scored, failed = self._world.total(table)
        return values, scored, failed

    def _report_failures(self, scores: Sequence[ComponentScores], failed: Tensor, may_drop_all: bool) -> None:
        """Raise an error, or log which rows are dropped or scored 0; the same on every rank."""
        counts = failed.sum(dim=1).tolist()
        if not any(counts):
            return
        reasons = self._world.all_gather_objects([next(iter(s.failures.values()), None) for s in scores])
        for place, component in enumerate(self._components):
            if not counts[place]:
                continue
            reason = next(of_rank[place] for of_rank in reasons if of_rank[place] is not None)
            where = f"for {counts[place]:.0f} of {failed.shape[1]} completions"
            limit = component.max_failure_fraction
            if component.on_failure == "stop":
                raise UserError(
                    f"reward component {component.name} must give a number or None per completion, it did not {where}: "
                    f"{reason}; fix it, or set its on_failure to drop or zero"
                )
            if counts[place] > limit * failed.shape[1]:
                raise UserError(
                    f"reward component {component.name} may fail for {limit:.0%} of the completions, it does {where}: "
                    f"{reason}; fix it, or raise its max_failure_fraction"
                )
            if self._world.is_main:
                what = "is scored 0" if component.on_failure == "zero" else "drops its rows"
                logger.warning("reward component %s %s %s: %s", component.name, what, where, reason)
            if component.on_failure == "drop" and not may_drop_all and bool(self._dropped(failed).all()):
                raise UserError(
                    f"reward components must leave completions to learn from, all {failed.shape[1]} of a rollout are "
                    f"dropped, {counts[place]:.0f} by {component.name}: {reason}; fix it"
                )

    def _dropped(self, failed: Tensor) -> Tensor:
        """[N] bool, failed rows of the components that drop them."""
        dropping = [component.on_failure == "drop" for component in self._components]
        return failed[torch.tensor(dropping, dtype=torch.bool)].any(dim=0)

    def _metrics(self, values: Tensor, scored: Tensor, failed: Tensor) -> dict[str, float]:
        if not self._logged:
            return {}
        metrics = {}
        for place, component in enumerate(self._components):
            scores = values[place][scored[place]]
            if len(scores):
                metrics[f"reward/{component.name}/mean"] = float(scores.mean())
                metrics[f"reward/{component.name}/std"] = spread(scores)
            if component.on_failure != "stop":
                count = "/failures" if component.on_failure == "zero" else "/dropped"
                metrics[f"reward/{component.name}{count}"] = float(failed[place].sum())
        return metrics

    def _counted(self, scores: Sequence[ComponentScores]) -> dict[str, float]:
        """Metrics of what components count."""
        if not any(component.counts for component in self._components):
            return {}
        by_rank = self._world.all_gather_objects([dict(of.counts) for of in scores])
        metrics: dict[str, float] = {}
        for place, component in enumerate(self._components):
            totals = Counter[str]()
            for of_rank in by_rank:
                totals.update(of_rank[place])
            metrics |= {f"reward/{component.name}/{name}": value for name, value in component.metrics(totals).items()}
        return metrics


def build_reward(
    components: Sequence[RewardComponentConfig],
    world: World,
    *,
    tokenizer: PreTrainedTokenizerBase,
    resolve: Callable[[str], str],
    load_tokenizer: Callable[[str], PreTrainedTokenizerBase],
    build_engine: Callable[[str, str], RoleModel],
    build_judge: Callable[[JudgeConfig, str], LocalModel],
    has_images: bool = False,
    folder: Path | None = None,
) -> Reward:
    """A reward from its config. Every rank calls.

    Args:
        components: components of the sum; empty where an environment gives the reward.
        world: the ranks that share rollouts.
        tokenizer: tokenizer of the actor.
        resolve: returns a path that can be loaded, from the name of a model in the config.
        load_tokenizer: returns the tokenizer of a resolved path.
        build_engine: returns the frozen engine of a component from its name and resolved path.
        build_judge: returns the model of a judge from its section and resolved path.
        has_images: prompts may have images.
        folder: folder of the run, where judges keep their verdicts; None: they keep them in memory.

    Raises:
        UserError: on every rank, for components of the same name, or a function or API key that any rank lacks.
    """
    require_distinct_names(components)
    background: dict[str, RewardComponent] = {}
    with shared_user_errors(world):
        for component in components:
            if component.model is None:
                require(
                    not (has_images and component.judge_path),
                    f"reward component {component.label} is a judge with path, which reads text, the rows have images: "
                    "serve its model and give the url, or remove the images",
                )
                require(
                    not (has_images and component.protocol == "openrlhf" and component.urls),
                    f"reward component {component.label} must have the protocol scores to read images, got openrlhf: "
                    "leave it out",
                )
                if component.judge_path is None:
                    background[component.label] = background_part(component, world, folder)

    def build(component: RewardComponentConfig) -> RewardComponent:
        if component.judge is not None and component.judge.path is not None:
            path = resolve(component.judge.path)
            with shared_user_errors(world):
                return background_part(component, world, folder, build_judge(component.judge, path))
        if component.model is None:
            return background[component.label]
        path = resolve(component.model)
        reward_tokenizer = load_tokenizer(path)
        reads_tokens = component.steps == "last" and tokenizes_alike(reward_tokenizer, tokenizer)
        require(
            reads_tokens or not has_images,
            f"reward model {component.label} must read the tokens of the actor to read images, {path} reads texts: use "
            "a model with the actor's tokens and chat template",
        )
        engine = build_engine(component.label, path)
        if has_images and engine.world.is_member and (refusal := images_refused(engine.config)):
            raise UserError(f"reward model {component.label} must read the images of the rows: {refusal}")
        with shared_user_errors(world):
            if not engine.world.is_member:
                return AbsentReward(component, engine, logged_alone=not reads_tokens)
            if reads_tokens:
                return ModelReward(component, engine, end=turn_end(tokenizer))
            return RetokenizingModelReward(component, engine, reward_tokenizer)

    return Reward([build(component) for component in components], world)


def background_part(
    component: RewardComponentConfig, world: World, folder: Path | None, local: LocalModel | None = None
) -> RewardComponent:
    """A component without a reward model; `local` is the model of a judge in the run."""
    if component.judge is not None:
        return JudgeReward(component, device=world.device, rank=world.rank, folder=folder, local=local)
    if component.verifier is not None:
        return VerifierReward(component, device=world.device, ranks=world.local_size)
    kind = FunctionReward if component.function is not None else EndpointReward
    return kind(component, device=world.device)
