"""Step 3's loop: rollout, updates, metrics; a page of verbs over the parts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.algorithms.experience import Experience, Sequences
from hybrid_rlhf.algorithms.kl_controller import KLController
from hybrid_rlhf.algorithms.ppo import PPOUpdater
from hybrid_rlhf.algorithms.rollout import Roles, Rollout, Scored
from hybrid_rlhf.configs.batch_plan import MicroBatches
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.data.collation import TokenBatch, collate_tokens
from hybrid_rlhf.data.loaders import BatchLoader, GlobalBatches
from hybrid_rlhf.engines.averaging import WeightAverage
from hybrid_rlhf.engines.checkpoints import load_checkpoint, save_checkpoint
from hybrid_rlhf.engines.partition import copy_weights
from hybrid_rlhf.functional.masking import masked_mean, masked_sum
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
        self._samples = SampleLog(run.folder, every=config.logging.samples_every, enabled=run.world.is_main)

    def train(self) -> None:
        """Run to the last step, from the start or from the run's checkpoint."""
        config, run = self._config, self._run
        step = self._resume() if run.checkpoint is not None else 0
        run.open_metrics(resumed_step=step)
        if self._rollout.scaling.needs_first_answers:
            self._scale_by_first_answers()
        if step == 0:
            before = self.evaluate()
            run.log(0, before)
            run.say("ppo before training", before)
        with run.display("ppo", total_steps=self._total_steps, done_steps=step) as display:
            for indices in self._batches.iterate(config.train.epochs):
                if step >= self._total_steps:
                    break
                step += 1
                with profiled(step, config.logging.profile_steps, run.folder, self._world):
                    metrics = self._step(step, [self._prompts[i] for i in indices])
                if step == self._total_steps or _due(step, config.train.eval_every):
                    metrics |= self.evaluate()
                run.log(step, metrics)
                display.show(step, {name: value for name, value in metrics.items() if name.startswith(_FIGURES)})
                if _due(step, config.train.save_every):
                    run.watchdog.beat(f"save after step {step}")
                    self._save(step)

    def _step(self, step: int, prompts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """One rollout and its updates."""
        start = time.perf_counter()
        ppo, rollout, timers = self._config.ppo, self._rollout, self._run.timers
        sequences = rollout.sample(prompts, step=step)
        layouts = [
            rollout.layout(sequences, step=step, epoch=epoch, mini_batches=ppo.mini_batches)
            for epoch in range(ppo.epochs)
        ]
        scored = rollout.score(prompts, sequences, layouts[0])
        experience = rollout.experience(sequences, scored, kl_coef=self._kl.kl_coef)
        with timers("training"):
            report = self._updater.update(
                experience, layouts, kl_coef=self._kl.kl_coef, train_actor=step > ppo.critic_warmup_steps
            )
        metrics = {
            **rollout_metrics(report.experience),
            "objective/kl_coef": self._kl.kl_coef,
            **rollout.scaling.metrics(),
            **scored.metrics,
            **report.metrics,
            **self._speed(experience, report.trained_tokens, time.perf_counter() - start),
        }
        self._kl.update(metrics["objective/kl"], completions=len(scored.scores))
        if _due(step, ppo.reference_refresh_every):
            assert self._roles.reference is not None
            copy_weights(self._roles.actor.lm, self._roles.reference.lm)
        self._samples.write(step, lambda: self._texts(prompts, sequences, scored))
        return metrics

    def _scale_by_first_answers(self) -> None:
        """Show the scaling the actor's answers to the first prompts, before it learns."""
        prompts = [self._prompts[i] for i in range(min(len(self._prompts), self._config.rollout.prompts_per_step))]
        self._rollout.scaling.observe(self._scored(prompts)[1].scores)

    def _scored(self, prompts: Sequence[Mapping[str, Any]]) -> tuple[Sequences, Scored]:
        """Answers to prompts outside the training steps, and what the roles say of them."""
        sequences = self._rollout.sample(prompts, step=_EVAL_STEP)
        layout = self._rollout.layout(sequences, step=0, epoch=0, mini_batches=1)
        return sequences, self._rollout.score(prompts, sequences, layout)

    def _speed(self, experience: Experience, trained_tokens: float, step_seconds: float) -> dict[str, float]:
        seconds = {"switch": self._roles.actor.switch_seconds, **self._run.timers.take()}
        generated = float(experience.sequences.response_mask.sum())
        tokens = float(experience.sequences.lengths.sum())
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
        metrics = evaluation_metrics(*self._scored(prompts), prefix="eval")
        if self._average is not None:
            with self._average.applied(), self._roles.actor.other_weights():
                metrics |= evaluation_metrics(*self._scored(prompts), prefix="eval_ema")
        self._run.timers.take()
        return metrics

    def _texts(
        self, prompts: Sequence[Mapping[str, Any]], sequences: Sequences, scored: Scored
    ) -> list[dict[str, Any]]:
        """Rows of samples.jsonl."""
        kl = masked_sum(scored.old_logprobs - scored.ref_logprobs, mask=sequences.response_mask, dim=1)
        rows = []
        for index in range(len(scored.scores)):
            tokens = sequences.input_ids[index][sequences.response_mask[index]]
            rows.append(
                {
                    "prompt": json.loads(prompts[index // self._config.rollout.samples_per_prompt]["prompt"]),
                    "completion": self._tokenizer.decode(tokens, skip_special_tokens=True),
                    "score": round(float(scored.penalised[index]), 4),
                    "kl": round(float(kl[index]), 4),
                }
            )
        return rows

    def _save(self, step: int) -> None:
        state = {
            "batches": self._batches.state_dict(),
            "kl": self._kl.state_dict(),
            "scaling": self._rollout.scaling.state_dict(),
        }
        save_checkpoint(
            self._run.folder, step, engines=self._trained, loop_state=state, world=self._world, average=self._average
        )

    def _resume(self) -> int:
        assert self._run.checkpoint is not None
        step, state = load_checkpoint(
            self._run.checkpoint, engines=self._trained, world=self._world, average=self._average
        )
        self._batches.load_state_dict(state["batches"])
        self._kl.load_state_dict(state["kl"])
        self._rollout.scaling.load_state_dict(state["scaling"])
        return step

    @property
    def _trained(self) -> dict[str, Any]:
        return {"actor": self._roles.actor, "critic": self._roles.critic}


_FIGURES = (
    "eval/",
    "objective/scores", "objective/kl", "policy/entropy", "loss/value", "val/explained_variance",
    "completions/mean_length", "perf/tokens_per_second",
)  # fmt: skip


def rollout_metrics(experience: Experience) -> dict[str, float]:
    """What a rollout says of itself, under TRL's names; KL and entropy are sums over a completion, in nats."""
    sequences = experience.sequences
    mask = sequences.response_mask
    difference = torch.where(mask, (sequences.sampled_logprobs - experience.old_logprobs).abs(), 0.0)
    return {
        "objective/kl": float(experience.kl.mean()),
        "objective/entropy": float(masked_sum(-experience.old_logprobs, mask=mask, dim=1).mean()),
        "objective/scores": float(experience.scores.mean()),
        "objective/scores_std": float(experience.scores.std(correction=0)),
        "objective/rlhf_reward": float(experience.rewards.sum(dim=1).mean()),
        "val/explained_variance": experience.explained_variance,
        "completions/mean_length": float(mask.sum(dim=1).float().mean()),
        "completions/clipped_ratio": float((~sequences.stopped).float().mean()),
        "rollout/logprob_abs_diff_mean": float(masked_mean(difference, mask=mask)),
        "rollout/logprob_abs_diff_max": float(difference.max()),
    }


def evaluation_metrics(sequences: Sequences, scored: Scored, *, prefix: str) -> dict[str, float]:
    """What answers to held-out prompts are worth; KL and length a completion."""
    kl = masked_sum(scored.old_logprobs - scored.ref_logprobs, mask=sequences.response_mask, dim=1)
    return {
        f"{prefix}/scores": float(scored.penalised.mean()),
        f"{prefix}/scores_std": float(scored.penalised.std(correction=0)),
        f"{prefix}/kl": float(kl.mean()),
        f"{prefix}/mean_length": float(sequences.response_mask.sum(dim=1).float().mean()),
        f"{prefix}/clipped_ratio": float((~sequences.stopped).float().mean()),
        **{f"{prefix}/{name}": value for name, value in scored.metrics.items()},
    }


def ptx_batches(
    rows: Dataset, *, global_batch_size: int, micro_batches: MicroBatches, seed: int, pad_token_id: int, run: Run
) -> Iterator[list[TokenBatch]]:
    """Pretraining text without end: this rank's micro-batches, one list an update."""
    loader = BatchLoader(
        rows,
        global_batch_size=global_batch_size,
        world_rank=run.world.rank,
        world_size=run.world.size,
        micro_batches=micro_batches,
        seed=seed,
    )
    for parts in loader.iterate():
        yield [collate_tokens(part, pad_token_id).to(run.world.device) for part in parts]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
