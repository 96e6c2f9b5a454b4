"""The table of rules: their checks, the advice, and sources that describe the sign."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.loop.advice import rl, training


@dataclass(frozen=True)
class AdviceRule:
    """A sign of an unhealthy run."""

    name: str
    check: rl.Rule
    """Returns the evidence at the last step, or None."""
    advice: str
    """Advice to the user. `{name}` (`/` as `__`) becomes the last value of a metric, `{name*5}` five times it."""
    source: str
    is_alert: bool = False
    """True for signs that the score no longer measures what it was meant to."""


_SPREAD = "{objective__scores_std:.3g}"

RULES = (
    AdviceRule(
        "KL explosion",
        rl.kl_explosion,
        "the policy leaves the reference, and the reward model no longer describes its completions: raise "
        "algorithm.kl.coef, lower actor.optimizer.lr, or set algorithm.target_kl",
        "Gao, Schulman, Hilton 2022, Scaling Laws for Reward Model Overoptimization (arXiv 2210.10760), section 3",
        is_alert=True,
    ),
    AdviceRule(
        "held-out score falls",
        rl.held_out_falls,
        "the policy fits the training prompts or a flaw of the reward: stop here or keep the best checkpoint "
        "(train.keep_best max:eval/scores), and read held-out completions",
        "Gao, Schulman, Hilton 2022, Scaling Laws for Reward Model Overoptimization (arXiv 2210.10760)",
        is_alert=True,
    ),
    AdviceRule(
        "diverging components",
        rl.diverging_components,
        "the sum hides what is lost: read completions in samples.jsonl, and change the weights of reward.components or "
        "the component that rises",
        "Skalse et al. 2022, Defining and Characterizing Reward Hacking (arXiv 2209.13085)",
    ),
    AdviceRule(
        "constant component",
        rl.constant_component,
        "a component that never varies teaches nothing: check its function on completions in samples.jsonl, give "
        "prompts that the model solves at times, or leave it out of reward.components",
        "DAPO (arXiv 2503.14476), section 3.2",
    ),
    AdviceRule(
        "growing truncation",
        rl.growing_truncation,
        "the score rises with answers that do not end: raise rollout.sampling.max_new_tokens, give "
        "algorithm.penalties.missing_eos or overlong_fraction, and read completions in samples.jsonl",
        "Huang et al. 2024, The N+ Implementation Details of RLHF with PPO (arXiv 2403.17031)",
    ),
    AdviceRule(
        "entropy collapse",
        rl.entropy_collapse,
        "the policy samples almost one completion per prompt and explores no more: raise algorithm.entropy_coef or the "
        "upper bound of algorithm.clip, or lower actor.optimizer.lr",
        "Yu et al. 2025, DAPO (arXiv 2503.14476), section 3.1",
    ),
    AdviceRule(
        "length drift",
        rl.length_drift,
        "read completions in samples.jsonl: if they repeat themselves or stop early, the reward prefers their length; "
        "algorithm.penalties.length acts against growth, algorithm dr_grpo has no bias towards length",
        "Singhal et al. 2023, A Long Way to Go (arXiv 2310.03716); Liu et al. 2025, Dr. GRPO (arXiv 2503.20783), "
        "section 3",
    ),
    AdviceRule(
        "truncated completions",
        rl.truncation,
        "almost no completion ends by itself: raise rollout.sampling.max_new_tokens if completions need more, or "
        f"algorithm.penalties.missing_eos above the standard deviation of the scores, {_SPREAD}; "
        "algorithm.penalties.length helps too",
        "Huang et al. 2024, The N+ Implementation Details of RLHF with PPO (arXiv 2403.17031); DAPO, section 3.4",
    ),
    AdviceRule(
        "clip fraction",
        rl.clip_fraction,
        "updates change the policy more than the clip allows, so much of the rollout teaches nothing: lower "
        "actor.optimizer.lr, algorithm.epochs or algorithm.mini_batches",
        "Schulman et al. 2017, PPO (arXiv 1707.06347), section 3; clipfrac in Huang et al. 2022, The 37 Implementation "
        "Details of PPO, debug variables",
    ),
    AdviceRule(
        "negative explained variance",
        rl.explained_variance,
        "the critic predicts returns worse than a constant: raise critic.optimizer.lr ({critic__lr:.3g}) or "
        "critic.head_lr, train it alone first (critic.warmup_steps 10), or bring scores, whose standard deviation is "
        f"{_SPREAD}, to 1 (algorithm.score_scaling running)",
        "explained_variance in Huang et al. 2022, The 37 Implementation Details of PPO, debug variables",
    ),
    AdviceRule(
        "critic explains nothing",
        rl.idle_critic,
        "the critic predicts no better than a constant, so advantages are as noisy as returns: raise "
        "critic.optimizer.lr ({critic__lr:.2g}) to {critic__lr*5:.1g}, or use an algorithm without a critic, such as "
        "rloo, which needs less memory",
        "explained_variance in Huang et al. 2022, The 37 Implementation Details of PPO, debug variables",
    ),
    AdviceRule(
        "policy hardly moves",
        rl.still_policy,
        "raise actor.optimizer.lr ({lr:.2g}) to {lr*5:.1g} (left out, it is derived from the model), or let the run "
        "take many more steps",
        "Gao, Schulman, Hilton 2022, Scaling Laws for Reward Model Overoptimization (arXiv 2210.10760): the score is a "
        "function of the KL, and begins at 0 with it",
    ),
    AdviceRule(
        "saturated scores",
        rl.saturated_scores,
        "completions score alike, so there is little left to prefer: add harder prompts, or a reward that tells good "
        "completions apart",
        "Yu et al. 2025, DAPO (arXiv 2503.14476), section 3.2, on prompts whose completions all have the same reward",
    ),
    AdviceRule(
        "groups of equal scores",
        rl.equal_groups,
        "most groups have advantage 0 and teach nothing: use prompts of medium difficulty, raise rollout.sampling.n or "
        "temperature, or set algorithm.dynamic_sampling",
        "Yu et al. 2025, DAPO (arXiv 2503.14476), section 3.2",
    ),
    AdviceRule(
        "sampler and trainer disagree",
        rl.sampler_mismatch,
        "the gradient is off-policy without the algorithm knowing: set rollout.dtype float32 or leave "
        "rollout.quantization out, or set algorithm.correction",
        "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    ),
    AdviceRule(
        "few effective samples",
        rl.few_effective_samples,
        "few tokens carry the gradient, because sampler and trainer are far apart: lower the policy lag or the "
        "learning rate, give algorithm.correction.ratio token, or a lower algorithm.correction.clip",
        "Kong 1992, A Note on Importance Sampling using Standardized Weights; 0.3: verl's rollout_corr.md",
    ),
    AdviceRule(
        "loss not finite",
        training.loss_not_finite,
        "lower the learning rate, and use bfloat16 or float32 instead of float16; the rows of skipped updates are in "
        "the folder nonfinite",
        "Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2",
    ),
    AdviceRule(
        "skipped steps",
        training.skipped_steps,
        "gradients or scores are not finite: read the rows in the folder nonfinite, and lower the learning rate",
        "Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2",
    ),
    AdviceRule(
        "gradient spikes",
        training.gradient_spikes,
        "some batches move the weights far more than others: lower the learning rate, raise its warm-up or the batch "
        "size, lower optimizer.max_grad_norm, and look for broken rows in the data",
        "Pascanu et al. 2013 (arXiv 1211.5063), section 3.2; Chowdhery et al. 2022, PaLM (arXiv 2204.02311), "
        "section 5.1",
    ),
    AdviceRule(
        "overfitting",
        training.overfitting,
        "train for fewer epochs, or keep the best checkpoint (train.keep_best min:eval/loss); before RL one more epoch "
        "may still help",
        "Prechelt 1998, Early Stopping - But When?; Ouyang et al. 2022, InstructGPT (arXiv 2203.02155), section 3.5, "
        "on more epochs before RL",
    ),
    AdviceRule(
        "accuracy at chance",
        training.accuracy_at_chance,
        "the pairs are not learned: check that chosen and rejected are not swapped or equal, that data.max_length does "
        "not cut their difference off, and raise optimizer.lr",
        "0.5 is guessing; Ouyang et al. 2022, InstructGPT (arXiv 2203.02155), section 4.1, has 0.70 to 0.72",
    ),
)
