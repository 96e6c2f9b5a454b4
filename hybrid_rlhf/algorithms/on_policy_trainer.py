"""Step 3's loop: rollout, updates, metrics; a page of verbs over the parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.collection import Collector, NothingToLearn
from hybrid_rlhf.algorithms.continuation import Continuation, due
from hybrid_rlhf.algorithms.experience import Layout, Sequences, taken_from, under
from hybrid_rlhf.algorithms.half_used import HalfUsed
from hybrid_rlhf.algorithms.kl_controller import KLController
from hybrid_rlhf.algorithms.nonfinite import NotFinite, SkippedSteps, rows_not_finite
from hybrid_rlhf.algorithms.on_policy import OnPolicyAlgorithm
from hybrid_rlhf.algorithms.roles import Roles
from hybrid_rlhf.algorithms.rollout import Rollout
from hybrid_rlhf.algorithms.rollout_metrics import evaluation_metrics, rollout_metrics, speed_metrics
from hybrid_rlhf.algorithms.sample_texts import SampleTexts
from hybrid_rlhf.algorithms.scoring import Scored
from hybrid_rlhf.algorithms.updater import Progress, Updater
from hybrid_rlhf.algorithms.warning_signs import WarningSigns
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.sections import require
from hybrid_rlhf.data.loaders import RowStream
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.checkpoints import LoopState
from hybrid_rlhf.engines.partition import copy_weights
from hybrid_rlhf.runtime.logs import LOGGER_NAME
from hybrid_rlhf.runtime.profiling import profiled
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.samples import SampleLog

logger = logging.getLogger(LOGGER_NAME)
_HALF_USED = "half_used."
_EVAL_STEP = 2**32
"""Key of the evaluation's random streams, out of the way of training steps: it samples alike each time."""


class OnPolicyTrainer:
    """Collects experience and learns from it until the prompts or max_steps end."""

    def __init__(
        self,
        roles: Roles,
        rollout: Rollout,
        updater: Updater,
        algorithm: OnPolicyAlgorithm,
        *,
        prompts: Dataset,
        held_out: Dataset,
        stream: RowStream,
        total_steps: int,
        config: PPOConfig,
        run: Run,
        tokenizer: PreTrainedTokenizerBase,
        average: WeightAverage | None,
    ) -> None:
        self._roles, self._rollout, self._updater, self._algorithm = roles, rollout, updater, algorithm
        self._prompts, self._held_out, self._stream = prompts, held_out, stream
        self._collector = Collector(
            rollout, algorithm, prompts=prompts, stream=stream, per_step=config.rollout.prompts_per_step,
            total_steps=total_steps, max_staleness=config.rollout.max_staleness,
        )  # fmt: skip
        self._ahead = self._collector.ahead
        self._total_steps, self._config, self._run = total_steps, config, run
        self._world, self._signs = run.world, WarningSigns(enabled=run.world.is_main)
        self._average, self._texts = average, SampleTexts(prompts, tokenizer)
        self._kl = KLController(config.ppo)
        self._skipped = SkippedSteps(run, limit=config.faults.max_skipped_steps)
        changing = roles.learners
        if config.ppo.reference_refresh_every and roles.reference is not None:
            changing["reference"] = roles.reference
        self._continuation = Continuation(run, config.train, changing, average)
        self._samples = SampleLog(run.folder, every=config.logging.samples_every, enabled=run.world.is_main)

    def train(self) -> None:
        """Run to the last step, from the start or from the run's checkpoint."""
        config, run = self._config, self._run
        done, half_used = self._resume()
        first = done == 0 and half_used is None
        run.open_metrics(None if first else done)
        self._samples.resume(done)
        if self._rollout.scaling.needs_first_answers:
            self._scale_by_first_answers()
        if first:
            before = self.evaluate()
            run.log(0, before)
            run.say(f"{config.algorithm} before training", before)
        display = run.display(config.algorithm, total_steps=self._total_steps, done_steps=done)
        with self._continuation.running(), self._ahead.running(), display:
            for step, rollout in self._rollouts(done, half_used):
                with profiled(step, config.logging.profile_steps, run.folder, self._world):
                    metrics = self._step(step, rollout)
                if step == self._total_steps or not self._ahead.is_left or due(step, config.train.eval_every):
                    metrics |= self.evaluate()
                run.log(step, metrics)
                display.show(step, {name: value for name, value in metrics.items() if name.startswith(_FIGURES)})
                self._continuation.after_step(step, partial(self._state, step), metrics)

    def _rollouts(self, step: int, half_used: HalfUsed | None) -> Iterator[tuple[int, HalfUsed | None]]:
        """The steps still to do; the first may have a rollout that was cut off in the midst of its updates."""
        if half_used is not None:
            step += 1
            yield step, half_used
        while step < self._total_steps and self._ahead.is_left:
            step += 1
            yield step, None

    def _step(self, step: int, rollout: HalfUsed | None) -> dict[str, float]:
        """One rollout, unless there is a half-used one, and its updates."""
        try:
            rollout = rollout or self._collect(step)
        except NothingToLearn as found:
            self._run.timers.take()
            if self._world.is_main:
                logger.warning("step %d learns nothing: %s", step, found)
            return found.metrics
        except NotFinite as found:
            self._run.timers.take()
            return self._skipped.settle(step, found.what)
        metrics, skipped = self._learn(rollout)
        self._signs.watch(step, metrics)
        return metrics | self._skipped.settle(step, skipped)

    def _collect(self, step: int) -> HalfUsed:
        """A step's rollout, scored.

        Raises:
            NotFinite: on every rank, when what a role says of a row is not finite.
            NothingToLearn: on every rank, when the algorithm chose no completion.
        """
        self._run.timers.take()  # a checkpoint may have waited for completions
        start, rollout = time.perf_counter(), self._rollout
        collected = self._collector.collect(step)
        scored = rollout.score(collected.chosen, self._layouts(step, collected.chosen.sequences)[0])
        self._require_finite(step, scored, collected.prompts)
        experience = rollout.experience(scored, kl_coef=self._kl.kl_coef)
        metrics = {**rollout.scaling.metrics(), **collected.metrics}
        if scored.ref_logprobs is not None:
            metrics["objective/kl_coef"] = self._kl.kl_coef
        stale = scored.sequences.stale_updates(self._roles.actor.weight_version)
        if stale or self._config.rollout.max_staleness:
            metrics["rollout/stale_updates"] = stale
        prompts = collected.prompts
        if self._config.ppo.mask_truncated:
            kept = experience.sequences.stopped.nonzero().flatten().tolist()
            if not kept:
                raise NothingToLearn("none of its completions ended by itself, see ppo.mask_truncated", metrics)
            experience, prompts = experience.rows(kept), [prompts[row] for row in kept]
        progress = Progress(self._world.device)
        return HalfUsed(step, prompts, experience, metrics, progress, start, collected.sampled_tokens)

    def _require_finite(self, step: int, scored: Scored, prompts: Sequence[int]) -> None:
        """Keep the rows of which a role says what is not finite, and raise NotFinite; on every rank."""
        told = {
            "log-probs": scored.old_logprobs, "reference log-probs": scored.ref_logprobs,
            "values": scored.old_values, "scores": scored.rated.scores,
        }  # fmt: skip
        faulty = rows_not_finite(
            {name: values for name, values in told.items() if values is not None}, mask=scored.sequences.response_mask
        )
        if not faulty:
            return
        if self._world.is_main:
            rows, scores = sorted({row for rows in faulty.values() for row in rows}), scored.rated.penalised
            self._skipped.keep(step, self._texts(prompts, scored.sequences, scores=scores, kl=scored.kl, rows=rows))
        raise NotFinite([f"{what} of {len(rows)} completions" for what, rows in faulty.items()])

    def _layouts(self, step: int, sequences: Sequences) -> list[Layout]:
        """Of each pass over a rollout."""
        ppo, together = self._config.ppo, self._algorithm.together
        return [
            self._rollout.layout(sequences, step=step, epoch=epoch, mini_batches=ppo.mini_batches, together=together)
            for epoch in range(ppo.epochs)
        ]

    def _learn(self, rollout: HalfUsed) -> tuple[dict[str, float], list[str]]:
        """The updates from a rollout: metrics of its step, and what in them was not finite and therefore skipped."""
        ppo, step, experience = self._config.ppo, rollout.step, rollout.experience
        with self._run.timers("training"):
            report = self._updater.update(
                experience,
                self._layouts(step, experience.sequences),
                kl_coef=self._kl.kl_coef,
                train_actor=step > ppo.critic_warmup_steps,
                progress=rollout.progress,
                between=lambda progress: self._continuation.within_step(partial(self._half_state, rollout)),
            )
        metrics = {
            **rollout_metrics(report.experience), **rollout.metrics, **report.metrics,
            **self._speed(rollout, report.trained_tokens),
        }  # fmt: skip
        if "objective/kl" in metrics:
            self._kl.update(metrics["objective/kl"], completions=len(experience.scores))
        if due(step, ppo.reference_refresh_every):
            assert self._roles.reference is not None
            copy_weights(self._roles.actor.lm, self._roles.reference.lm)
        written = partial(
            self._texts, rollout.prompts, experience.sequences, scores=experience.scores, kl=experience.kl
        )
        self._samples.write(step, written)
        skipped = rollout.progress.skipped
        self._skipped.keep(step, written(rows=sorted({row for rows in skipped.values() for row in rows})))
        return metrics, [f"a gradient of the {role}" for role in skipped]

    def _scale_by_first_answers(self) -> None:
        """Show the scaling the actor's answers to the first prompts, before it learns."""
        prompts = [self._prompts[i] for i in range(min(len(self._prompts), self._config.rollout.prompts_per_step))]
        self._rollout.scaling.observe(self._scored(prompts).rated.scores)

    def _scored(self, prompts: Sequence[Mapping[str, Any]]) -> Scored:
        """Answers to prompts outside the training steps, and what the roles say of them."""
        rated = self._rollout.rate(prompts, self._rollout.sample(prompts, step=_EVAL_STEP, shown_as="evaluation"))
        return self._rollout.score(rated, self._rollout.layout(rated.sequences))

    def _speed(self, rollout: HalfUsed, trained_tokens: float) -> dict[str, float]:
        """Where the time of a step went; {} for one that was cut off, whose beginning was not timed."""
        seconds = {"switch": self._roles.actor.switch_seconds, **self._run.timers.take()}
        if rollout.start is None:
            return {}
        seconds["step"] = time.perf_counter() - rollout.start
        return speed_metrics(
            self._roles, rollout.sampled_tokens, trained_tokens, seconds, hidden=self._ahead.hidden_seconds
        )

    def evaluate(self) -> dict[str, float]:
        """Scores and KL of sampled answers to the held-out prompts, of the averaged actor too; {} without prompts."""
        if not len(self._held_out):
            return {}
        prompts = [self._held_out[i] for i in range(len(self._held_out))]
        metrics = evaluation_metrics(self._scored(prompts), prefix="eval")
        if self._average is not None:
            with self._average.applied(), self._roles.actor.other_weights():
                metrics |= evaluation_metrics(self._scored(prompts), prefix="eval_ema")
        self._run.timers.take()
        return metrics

    def _state(self, step: int) -> LoopState:
        """What a checkpoint keeps of the loop."""
        self._samples.flush()
        content: dict[str, Any] = {
            "prompts": self._stream.state_dict(),
            "algorithm": {"name": self._config.algorithm, **self._algorithm.state_dict()},
            "kl": self._kl.state_dict(),
            "scaling": self._rollout.scaling.state_dict(),
            "skipped": self._skipped.state_dict(),
            "ahead": self._ahead.state_dict(),
        }
        if self._updater.ptx is not None:
            content["ptx"] = self._updater.ptx.state_dict()
        return LoopState(step, content, tensors=self._ahead.tensors())

    def _half_state(self, rollout: HalfUsed) -> LoopState:
        state = self._state(rollout.step - 1)
        named = under(_HALF_USED, rollout.experience.tensors())
        content = {**state.content, "half_used": rollout.state_dict(self._world)}
        return LoopState(state.step, content, rollout.progress.updates, {**state.tensors, **named})

    def _resume(self) -> tuple[int, HalfUsed | None]:
        """The step that the run goes on from, 0 where it starts, and what is left of the next one's rollout."""
        state = self._continuation.resume()
        if state is None:
            return 0, None
        content, mine = state.content, self._config.algorithm
        before = content["algorithm"].get("name", mine)
        require(
            before == mine,
            f"a checkpoint goes on with its algorithm {before}, got {mine}: give --algorithm {before}, or start "
            "anew in another output_dir",
        )
        require(
            self._config.corrects_stale or not content.get("ahead"),
            "the checkpoint holds completions that older weights sampled (rollout.max_staleness), got "
            "ppo.sampler_correction none: give truncate or mask",
        )
        self._stream.load_state_dict(content["prompts"])
        self._algorithm.load_state_dict(content["algorithm"])
        self._kl.load_state_dict(content["kl"])
        self._rollout.scaling.load_state_dict(content["scaling"])
        self._skipped.load_state_dict(content["skipped"])
        self._ahead.load_state_dict(content.get("ahead", ()), state.tensors, self._world)
        if self._updater.ptx is not None and "ptx" in content:
            self._updater.ptx.load_state_dict(content["ptx"])
        if state.update is None:
            return state.step, None
        tensors = taken_from(_HALF_USED, state.tensors)
        return state.step, HalfUsed.restore(state.step + 1, content["half_used"], tensors, self._world)


_FIGURES = (
    "eval/",
    "objective/scores", "objective/kl", "policy/entropy", "loss/value", "val/explained_variance",
    "completions/mean_length", "perf/tokens_per_second",
)  # fmt: skip
