"""Step 3's loop: rollout, updates, metrics; a page of verbs over the parts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.continuation import Continuation, due
from hybrid_rlhf.algorithms.experience import Layout, Sequences
from hybrid_rlhf.algorithms.half_used import HalfUsed
from hybrid_rlhf.algorithms.kl_controller import KLController
from hybrid_rlhf.algorithms.nonfinite import NotFinite, SkippedSteps, rounded, rows_not_finite
from hybrid_rlhf.algorithms.ppo import PPOUpdater, Progress
from hybrid_rlhf.algorithms.rollout import Roles, Rollout, Scored
from hybrid_rlhf.algorithms.rollout_metrics import completion_kl, evaluation_metrics, rollout_metrics
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.data.loaders import GlobalBatches
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.checkpoints import LoopState
from hybrid_rlhf.engines.engine import ModelEngine
from hybrid_rlhf.engines.partition import copy_weights
from hybrid_rlhf.runtime.profiling import decode_roofline, model_flops_utilisation, profiled
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.samples import SampleLog
from hybrid_rlhf.runtime.timers import peak_memory_gib

_EVAL_STEP = 2**32
"""Key of the evaluation's random streams, out of the way of training steps: it samples alike each time."""


class PPOTrainer:
    """Collects experience and learns from it until the prompts or max_steps end."""

    def __init__(
        self,
        roles: Roles,
        rollout: Rollout,
        updater: PPOUpdater,
        *,
        prompts: Dataset,
        held_out: Dataset,
        batches: GlobalBatches,
        total_steps: int,
        config: PPOConfig,
        run: Run,
        tokenizer: PreTrainedTokenizerBase,
        average: WeightAverage | None,
    ) -> None:
        self._roles, self._rollout, self._updater = roles, rollout, updater
        self._prompts, self._held_out, self._batches = prompts, held_out, batches
        self._total_steps, self._config, self._run = total_steps, config, run
        self._world = run.world
        self._tokenizer, self._average = tokenizer, average
        self._kl = KLController(config.ppo)
        self._skipped = SkippedSteps(run, limit=config.faults.max_skipped_steps)
        changing: dict[str, ModelEngine] = {"actor": roles.actor, "critic": roles.critic}
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
            run.say("ppo before training", before)
        display = run.display("ppo", total_steps=self._total_steps, done_steps=done)
        with self._continuation.running(), display:
            for step, rollout in self._rollouts(done, half_used):
                with profiled(step, config.logging.profile_steps, run.folder, self._world):
                    metrics = self._step(step, rollout)
                if step == self._total_steps or due(step, config.train.eval_every):
                    metrics |= self.evaluate()
                run.log(step, metrics)
                display.show(step, {name: value for name, value in metrics.items() if name.startswith(_FIGURES)})
                self._continuation.after_step(step, partial(self._state, step), metrics)

    def _rollouts(self, step: int, half_used: HalfUsed | None) -> Iterator[tuple[int, HalfUsed | None]]:
        """The steps still to do; the first may have a rollout that was cut off in the midst of its updates."""
        if half_used is not None:
            step += 1
            yield step, half_used
        for indices in self._batches.iterate(self._config.train.epochs):
            if step >= self._total_steps:
                break
            step += 1
            self._indices = indices
            yield step, None

    def _step(self, step: int, rollout: HalfUsed | None) -> dict[str, float]:
        """One rollout, unless there is a half-used one, and its updates."""
        try:
            rollout = rollout or self._collect(step)
        except NotFinite as found:
            self._run.timers.take()
            return self._skipped.settle(step, found.what)
        metrics, skipped = self._learn(rollout)
        return metrics | self._skipped.settle(step, skipped)

    def _collect(self, step: int) -> HalfUsed:
        """A step's rollout, scored.

        Raises:
            NotFinite: on every rank, when what a role says of a row is not finite.
        """
        start = time.perf_counter()
        prompts = [self._prompts[i] for i in self._indices]
        rollout = self._rollout
        rated = rollout.rate(prompts, rollout.sample(prompts, step=step))
        scored = rollout.score(rated, self._layouts(step, rated.sequences)[0])
        of_prompts = [self._indices[row // self._config.rollout.samples_per_prompt] for row in rated.rows]
        faulty = rows_not_finite(
            {"log-probs": scored.old_logprobs, "reference log-probs": scored.ref_logprobs,
             "values": scored.old_values, "scores": scored.scores}, mask=scored.sequences.response_mask,
        )  # fmt: skip
        if faulty:
            if self._world.is_main:
                rows = sorted({row for rows in faulty.values() for row in rows})
                kl, scores = completion_kl(scored), scored.penalised
                self._skipped.keep(step, self._texts(of_prompts, scored.sequences, scores=scores, kl=kl, rows=rows))
            raise NotFinite([f"{what} of {len(rows)} completions" for what, rows in faulty.items()])
        experience = rollout.experience(scored, kl_coef=self._kl.kl_coef)
        metrics = {"objective/kl_coef": self._kl.kl_coef, **rollout.scaling.metrics(), **rated.metrics}
        return HalfUsed(step, of_prompts, experience, metrics, Progress(self._world.device), start)

    def _layouts(self, step: int, sequences: Sequences) -> list[Layout]:
        """Of each pass over a rollout."""
        ppo = self._config.ppo
        return [
            self._rollout.layout(sequences, step=step, epoch=epoch, mini_batches=ppo.mini_batches)
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
        self._rollout.scaling.observe(self._scored(prompts).scores)

    def _scored(self, prompts: Sequence[Mapping[str, Any]]) -> Scored:
        """Answers to prompts outside the training steps, and what the roles say of them."""
        rated = self._rollout.rate(prompts, self._rollout.sample(prompts, step=_EVAL_STEP))
        return self._rollout.score(rated, self._rollout.layout(rated.sequences, step=0, epoch=0, mini_batches=1))

    def _speed(self, rollout: HalfUsed, trained_tokens: float) -> dict[str, float]:
        """Where the time of a step went; {} for one that was cut off, whose beginning was not timed."""
        seconds = {"switch": self._roles.actor.switch_seconds, **self._run.timers.take()}
        if rollout.start is None:
            return {}
        step_seconds = time.perf_counter() - rollout.start
        sequences = rollout.experience.sequences
        generated = float(sequences.response_mask.sum())
        tokens = float(sequences.lengths.sum())
        return {
            "perf/generation_tokens_per_second": generated / seconds["generation"],
            "perf/train_tokens_per_second": trained_tokens / seconds["training"],
            "perf/tokens_per_second": tokens / step_seconds,
            **model_flops_utilisation(
                parameters=self._roles.actor.parameters + self._roles.critic.parameters, tokens=trained_tokens,
                seconds=seconds["training"], ranks=self._world.size, device=self._world.device,
            ),
            **decode_roofline(
                read_bytes=self._roles.actor.decode_bytes, seconds=seconds["generation"], device=self._world.device
            ),
            **{f"time/{name}_seconds": taken for name, taken in seconds.items()},
            "time/other_seconds": step_seconds - sum(seconds.values()),
            "time/step_seconds": step_seconds,
            "memory/peak_gib": peak_memory_gib(self._world.device),
        }  # fmt: skip

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

    def _texts(
        self, prompts: Sequence[int], sequences: Sequences, *, scores: Tensor, kl: Tensor,
        rows: Sequence[int] | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Rows of samples.jsonl: some of a rollout's completions, or all."""
        texts = []
        for row in range(len(scores)) if rows is None else rows:
            tokens = sequences.input_ids[row][sequences.response_mask[row]]
            texts.append(
                {
                    "prompt": json.loads(self._prompts[prompts[row]]["prompt"]),
                    "completion": self._tokenizer.decode(tokens, skip_special_tokens=True),
                    "score": rounded(scores[row]),
                    "kl": rounded(kl[row]),
                }
            )
        return texts

    def _state(self, step: int) -> LoopState:
        """What a checkpoint keeps of the loop."""
        self._samples.flush()
        content: dict[str, Any] = {
            "batches": self._batches.state_dict(),
            "kl": self._kl.state_dict(),
            "scaling": self._rollout.scaling.state_dict(),
            "skipped": self._skipped.state_dict(),
        }
        if self._updater.ptx is not None:
            content["ptx"] = self._updater.ptx.state_dict()
        return LoopState(step, content)

    def _half_state(self, rollout: HalfUsed) -> LoopState:
        state = self._state(rollout.step - 1)
        content = {**state.content, "half_used": rollout.state_dict(self._world)}
        return LoopState(state.step, content, rollout.progress.updates, rollout.experience.tensors())

    def _resume(self) -> tuple[int, HalfUsed | None]:
        """The step that the run goes on from, 0 where it starts, and what is left of the next one's rollout."""
        state = self._continuation.resume()
        if state is None:
            return 0, None
        content = state.content
        self._batches.load_state_dict(content["batches"])
        self._kl.load_state_dict(content["kl"])
        self._rollout.scaling.load_state_dict(content["scaling"])
        self._skipped.load_state_dict(content["skipped"])
        if self._updater.ptx is not None and "ptx" in content:
            self._updater.ptx.load_state_dict(content["ptx"])
        if state.update is None:
            return state.step, None
        return state.step, HalfUsed.restore(state.step + 1, content["half_used"], state.tensors, self._world)


_FIGURES = (
    "eval/",
    "objective/scores", "objective/kl", "policy/entropy", "loss/value", "val/explained_variance",
    "completions/mean_length", "perf/tokens_per_second",
)  # fmt: skip
