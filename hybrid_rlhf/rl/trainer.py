"""The RL trainer: each step samples completions, scores them, estimates advantages and updates actor and critic."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.engines.saved.checkpoints import LoopState
from hybrid_rlhf.loop.checkpointing import CheckpointManager, due
from hybrid_rlhf.loop.non_finite import NonFiniteError, SkippedUpdates, non_finite_rows
from hybrid_rlhf.loop.trainer import Trainer
from hybrid_rlhf.rl.evaluation import EVALUATION_STEP
from hybrid_rlhf.rl.metrics import evaluation_metrics, rollout_metrics, speed_metrics
from hybrid_rlhf.rl.parts import RLSession
from hybrid_rlhf.rl.rollouts.advantages import KLController, NothingToLearn
from hybrid_rlhf.rl.rollouts.entropy import EntropyController
from hybrid_rlhf.rl.rollouts.samples import SampleTexts, token_arrays, token_rows
from hybrid_rlhf.rl.sharing import restored_rows, with_prefix, without_prefix
from hybrid_rlhf.rl.types import Batch, Rollout
from hybrid_rlhf.rl.updates.updater import LastLogprobs, Progress, UpdateReport
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.observability.samples import SampleLog
from hybrid_rlhf.runtime.observability.token_log import TokenLog

_PARTIAL_STEP = "partial_step."
_LAST_LOGPROBS = "last_logprobs."
_SHOWN_METRICS = (
    "objective/scores",
    "objective/kl",
    "teacher/kl",
    "policy/entropy",
    "loss/value",
    "val/explained_variance",
    "completions/mean_length",
    "perf/tokens_per_second",
    "eval/",
)
_DIFFERENCE = "logprob_abs_diff"
_ALL_TRUNCATED = "none of its completions ended by itself, see algorithm.mask_truncated"


class RLTrainer(Trainer):
    """Trains actor and critic until the prompts or max_steps end."""

    def __init__(self, session: RLSession) -> None:
        """Take the parts, data and settings of a session."""
        config = session.config
        run = session.run
        parts = session.parts
        roles = parts.roles
        sampler = parts.roles.sampler
        changing = dict(roles.learners)
        if config.reference.refresh_every and roles.reference is not None:
            changing["reference"] = roles.reference
        super().__init__(
            config.algorithm.name,
            total_steps=session.total_steps,
            config=config.train,
            run=run,
            checkpoints=CheckpointManager(run, config.train, changing, parts.updater.average),
            shown_metrics=_SHOWN_METRICS,
        )
        self._session = session
        self._rl = config
        self._parts = parts
        self._roles = roles
        self._scorer = parts.scorer
        self._updater = parts.updater
        self._collector = session.collector
        self._stream = session.collector.stream
        self._epochs = config.algorithm.epochs
        self._max_logprob_diff = run.world.broadcast_object(sampler.max_logprob_diff, source=sampler.world.members[0])
        self._kl = KLController(config.algorithm.kl)
        self._entropy: EntropyController | None = None
        if (entropy := parts.algorithm.entropy) is not None and entropy.method == "adaptive":
            self._entropy = EntropyController(entropy, coef=config.algorithm.entropy_coef)
        self._texts = SampleTexts(session.prompts, session.tokenizer, roles.images_of)
        self._skipped = SkippedUpdates(run, limit=config.faults.max_skipped_steps)
        self._samples = SampleLog(run.folder, enabled=run.world.is_main)
        self._tokens = TokenLog(run.folder, ranks=run.world.size, enabled=run.world.is_main)
        self._stateful: dict[str, Any] = {
            "prompts": self._stream.row_stream,
            "kl": self._kl,
            "scaling": parts.scaling,
            "skipped": self._skipped,
        } | ({} if self._entropy is None else {"entropy": self._entropy})
        """Parts whose state a checkpoint has under these names."""
        self._interrupted: tuple[Batch, Progress] | None = None
        """A resumed step with updates that have not been made yet."""

    def step(self, step: int) -> dict[str, float]:
        """Take completions, score them and estimate advantages (`batch`), update, log."""
        self._run.timers.take()  # evaluations, and writing a checkpoint, may have taken time
        start = time.perf_counter()
        resumed, self._interrupted = self._interrupted, None
        try:
            batch, progress = resumed or (self.batch(step), None)
            report = self._update(step, batch, progress)
        except NothingToLearn as error:
            if self._world.is_main:
                logger.warning("step %d learns nothing: %s", step, error)
            return error.metrics
        except NonFiniteError as error:
            return self._skipped.record(step, error.what)
        rolled = rollout_metrics(report.batch, self._world)
        if self._rl.algorithm.reads_sampler:  # only the updates compare
            rolled = {name: value for name, value in rolled.items() if _DIFFERENCE not in name}
        metrics = {**rolled, **batch.metrics, **report.metrics}
        metrics |= self._speed(report, None if resumed else start)
        self._require_own_samples(step, metrics)
        if self._trains_actor(step):
            metrics |= self._move_coefficients(metrics, completions=len(report.batch.rollout.numbered(self._world)))
        if due(step, self._rl.reference.refresh_every):
            self._roles.refresh_reference()
        self._write_samples(step, report.batch, report.ratios)
        return metrics | self._skipped.record(step, self._kept_faults(step, report))

    def _trains_actor(self, step: int) -> bool:
        critic = self._rl.critic
        return critic is None or step > critic.warmup_steps

    def _records(self, step: int) -> bool:
        """True if the samples of a step are written."""
        every = self._rl.logging.samples_every
        return due(step - 1, every) or (every > 0 and step == self.total_steps)

    def _update(self, step: int, batch: Batch, progress: Progress | None) -> UpdateReport:
        """Update actor and critic, with checkpoints within the step.

        Raises:
            NothingToLearn: on every rank, when all completions are truncated; writes their samples.
        """
        plans = [self._parts.plan(batch.rollout, step=step, epoch=epoch) for epoch in range(self._epochs)]
        if not plans[0].rows:
            self._write_samples(step, batch)
            raise NothingToLearn(_ALL_TRUNCATED, {**rollout_metrics(batch, self._world), **batch.metrics})
        if self._entropy is not None:
            self._entropy.measure(batch.rollout, self._world)
        with self._run.timers("training"):
            return self._updater.update(
                batch,
                plans,
                kl_coef=self._kl.kl_coef,
                entropy_coef=None if self._entropy is None else self._entropy.coef,
                train_actor=self._trains_actor(step),
                progress=progress,
                keeps_ratios=self._records(step) and self._rl.logging.tokens,
                between=lambda batch, progress: self._checkpoints.within_step(
                    partial(self._partial_state, step, batch, progress)
                ),
            )

    def _move_coefficients(self, metrics: Mapping[str, float], *, completions: int) -> dict[str, float]:
        """Move the coefficients of KL and entropy after an update of the actor; returns that of the entropy."""
        if "objective/kl" in metrics:
            self._kl.update(metrics["objective/kl"], completions=completions)
        if self._entropy is None:
            return {}
        used = {"policy/entropy_coef": self._entropy.coef}
        self._entropy.update()
        return used

    def _kept_faults(self, step: int, report: UpdateReport) -> list[str]:
        """What was not finite in a step's updates; the rows that may be the cause are written out."""
        if report.skipped is None:
            return []
        self._skipped.keep(step, self._texts(report.skipped.rows, report.skipped.numbers))
        return [f"a gradient of the {role}" for role in report.skipped.roles]

    def batch(self, step: int) -> Batch:
        """This rank's training data of a step: its rollout with rewards and advantages. Every rank calls, in the order
        of steps.

        Raises:
            NothingToLearn: on every rank, when there is no completion to learn from.
            NonFiniteError: on every rank, when a score, log-prob or value is not finite.
        """
        rollout = self._collector.collect(step)
        plan = self._parts.plan(rollout, step=step)
        # records have the entropy of all tokens
        rollout = self._scorer.compute_logprobs(rollout, plan, defers=not self._records(step))
        self._require_finite(step, rollout)
        return self._parts.estimate(rollout, kl_coef=self._kl.kl_coef, step=step)

    def _require_finite(self, step: int, rollout: Rollout) -> None:
        """Write out the rows with a value that is not finite, and raise NonFiniteError; on every rank."""
        computed = {
            "log-probs": rollout.old_logprobs,
            "reference log-probs": rollout.ref_logprobs,
            "teacher log-probs": rollout.teacher_logprobs,
            "values": rollout.old_values,
            "scores": rollout.scores,
        }
        faulty = non_finite_rows(
            {name: values for name, values in computed.items() if values is not None}, mask=rollout.response_mask
        )
        counts = self._world.total(torch.tensor([len(faulty.get(what, [])) for what in computed])).tolist()
        if not any(counts):
            return
        rows = sorted({row for rows in faulty.values() for row in rows})
        numbers = rollout.numbered(self._world).mine
        self._skipped.keep(step, self._texts(rollout.rows(rows), [numbers[row] for row in rows]))
        found = zip(computed, counts, strict=True)
        raise NonFiniteError([f"{what} of {count} completions" for what, count in found if count])

    def _require_own_samples(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise UserError if current weights sampled tokens with other log-probs than training gives them, in the mean
        of all tokens or of a depth."""
        limit = self._max_logprob_diff
        for name, diff in metrics.items():
            compared = _DIFFERENCE in name and not name.endswith("_max")
            if not compared or diff <= limit or metrics.get("rollout/stale_updates"):  # NaN is a difference too
                continue
            raise UserError(
                f"sampler and training must agree to {limit:.3g} nats per token in the mean, they differ by {diff:.3g} "
                f"in the rollout of step {step} ({name}), while the weights agree: set rollout.backend to module, "
                "leave rollout.vllm out, and report the model, or raise faults.max_logprob_diff"
            )

    def _write_samples(self, step: int, batch: Batch, ratios: torch.Tensor | None = None) -> None:
        """Write the samples of a step and, if configured, their tokens, if they are due. Every rank calls."""
        if not self._records(step):
            return
        index = batch.rollout.numbered(self._world)
        self._samples.write(step, index.bring(self._texts.of_batch(batch, index.mine)))
        if self._rl.logging.tokens:
            rows = index.bring(token_rows(batch, ratios))
            self._tokens.write(step, lambda: token_arrays(rows))

    def _speed(self, report: UpdateReport, start: float | None) -> dict[str, float]:
        """Speed and time of a step; {} for a resumed one, whose beginning was not timed."""
        cost = self._parts.sampler.cost
        synced = {"weight_sync": cost.weight_sync_seconds, "weight_check": cost.weight_check_seconds}
        seconds = synced | self._run.timers.take()
        if self._run.timers.measures_memory:
            self._run.peaks = self._world.all_gather_objects(self._run.timers.peaks_gib)
        if start is None:
            return {}
        seconds["step"] = time.perf_counter() - start
        return speed_metrics(
            self._roles,
            self._collector.sampled,
            report.trained_tokens,
            report.operations,
            seconds,
            work=cost.work,
            hidden=self._stream.hidden_seconds,
        )

    def evaluate(self) -> dict[str, float]:
        """Scores and KL of completions of the held-out prompts, of the averaged actor too; {} without prompts."""
        prompts = list(self._session.held_out)
        if not prompts:
            return {}
        metrics = evaluation_metrics(self._evaluated(prompts), self._world, prefix="eval", prompts=prompts)
        if self._rl.actor.ema_decay:
            with self._updater.averaged(), self._roles.sampler.other_weights():
                metrics |= evaluation_metrics(self._evaluated(prompts), self._world, prefix="eval_ema", prompts=prompts)
        return metrics

    def _evaluated(self, prompts: Sequence[Mapping[str, Any]]) -> Rollout:
        """Completions of prompts outside the training steps, scored, with log-probs."""
        rollout = self._parts.sampler.sample(prompts, step=EVALUATION_STEP, shown_as="evaluation")
        rollout = self._scorer.score(prompts, rollout, evaluates=True)
        return self._scorer.compute_logprobs(rollout, self._parts.planner.plan(rollout))

    @property
    def has_next(self) -> bool:
        """True if an interrupted step or prompts for another step are left."""
        return self._interrupted is not None or self._stream.has_next

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Context around the training loop: at its end, the completions that are in flight are abandoned."""
        return self._stream.running()

    def state(self, step: int) -> LoopState:
        """Return the state of the run after a step, for a checkpoint. Every rank calls."""
        self._samples.flush()
        content = {name: part.state_dict() for name, part in self._stateful.items()}
        content["algorithm"] = {"name": self._rl.algorithm.name, **self._parts.algorithm.state_dict()}
        content["ahead"] = self._stream.state_dict()
        carried, tensors = self._stream.carried_state(self._world)
        if carried is not None:
            content["carried"] = carried
        if self._rl.ptx is not None:  # only ranks with the actor have the position
            ptx_state = None if self._updater.ptx is None else self._updater.ptx.loader.state_dict()
            content["ptx"] = next(state for state in self._world.all_gather_objects(ptx_state) if state is not None)
        return LoopState(step, content, tensors=tensors)

    def _partial_state(self, step: int, batch: Batch, progress: Progress) -> LoopState:
        state = self.state(step - 1)
        partial_step = {"metrics": dict(batch.metrics), "progress": progress.state_dict(self._roles)}
        last = {} if progress.last is None else progress.last.tensors()
        tensors = {
            **state.tensors,
            **with_prefix(_PARTIAL_STEP, batch.tensors() if len(batch) else {}),
            **with_prefix(_LAST_LOGPROBS, last),
        }
        return LoopState(state.step, {**state.content, "partial_step": partial_step}, progress.updates, tensors)

    def resume(self) -> int | None:
        """Restore the newest checkpoint and return its step; None without a checkpoint."""
        state = self._checkpoints.resume()
        if state is not None:
            self._restore(state)
        done = 0 if state is None else state.step
        self._samples.resume(done)
        self._tokens.resume(done)
        if self._parts.scaling.needs_initial_scores:
            prompts = self._session.prompts
            first = range(min(len(prompts), self._rl.rollout.prompts_per_step))
            rollout = self._evaluated([prompts[i] for i in first])
            assert rollout.scores is not None
            self._parts.scaling.observe(rollout.numbered(self._world).gather(rollout.scores))
        return None if state is None else state.step

    def _restore(self, state: LoopState) -> None:
        content = state.content
        mine = self._rl.algorithm.name
        before = content["algorithm"].get("name", mine)
        require(
            before == mine,
            f"a checkpoint resumes with its algorithm {before}, got {mine}: set --algorithm {before}, or start a new "
            "run in another output_dir",
        )
        require(
            self._rl.algorithm.allows_other_sampler or not content.get("ahead"),
            "the checkpoint holds completions that older weights sampled (rollout.max_lag), got "
            "algorithm.correction.method none: give truncate or mask",
        )
        for name, part in self._stateful.items():
            if name in content:
                part.load_state_dict(content[name])
        self._parts.algorithm.load_state_dict(content["algorithm"])
        self._stream.load_state_dict(content.get("ahead", ()), state.shards, content.get("carried"))
        if self._updater.ptx is not None and "ptx" in content:
            self._updater.ptx.loader.load_state_dict(content["ptx"])
        if state.update is not None:
            stored = content["partial_step"]
            batch = restored_rows(Batch, state.shards, _PARTIAL_STEP, stored["metrics"], self._world)
            assert batch is not None
            self._roles.images_of(batch.rollout)  # which brings them to the run's folder for its own checkpoints
            progress = Progress(self._world.device)
            progress.load_state_dict(stored["progress"], self._roles)
            last = [without_prefix(_LAST_LOGPROBS, shard) for shard in state.shards]
            progress.last = LastLogprobs.from_tensors(last, self._world)
            self._interrupted = batch, progress
