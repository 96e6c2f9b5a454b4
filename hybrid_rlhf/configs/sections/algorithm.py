"""Shared settings of RL algorithms: optional parts (KL penalty, score penalties, dynamic sampling, correction for the
difference between sampler and trainer, entropy control), and base classes with keys that several algorithms read.

The algorithms themselves are in configs/algorithms.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.sections.rules import (
    Bounds,
    Count,
    Natural,
    NonNegative,
    Positive,
    PositiveShare,
    Settings,
    Share,
    advanced,
    require,
    require_defaults,
    section,
)


class KLConfig(Settings):
    """KL penalty of the actor against the reference."""

    coef: Annotated[float, Interval(gt=0), "give --algorithm.kl null for no penalty"] = 0.05
    """Weight of the penalty per token (0.05: N+ details, arXiv 2403.17031)."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL per token: k1 log-ratio, k2 half its square, k3 r - 1 - log r, at most 10 nats
    (joschu.net/blog/kl-approx.html). With where loss it affects the value only; the gradient is the KL's in any
    case."""
    where: Literal["reward", "loss"] = "reward"
    """reward: subtracted from the reward of each token (InstructGPT); loss: a term of the actor's loss (GRPO)."""
    target: Positive | None = advanced(None)
    """KL per completion, in nats, to which coef is adapted; null: coef is constant (N+ details)."""
    horizon: Count = advanced(10000)
    """Completions over which coef adapts to target (10000: arXiv 1909.08593, section 2.2)."""

    def _check(self) -> None:
        require(
            self.target is not None or self.horizon == 10000,
            f"algorithm.kl.horizon needs algorithm.kl.target, got {self.horizon} and no target: leave it out",
        )
        require(
            self.where == "reward" or self.estimator != "k1",
            "algorithm.kl.estimator k1 has no gradient of the KL in a loss, got algorithm.kl.where loss: take k2 or k3",
        )


class PenaltiesConfig(Settings):
    """Penalties that are subtracted from scores."""

    missing_eos: NonNegative | Literal["auto"] = 0.0
    """Penalty of a completion that does not end with EOS (the EOS trick of N+ details; TRL's examples: 1); auto: the
    standard deviation of the rollout's scores, or 1 if scores are scaled."""
    length: float = 0.0
    """Penalty per completion token."""
    overlong_fraction: Share = 0.0
    """Last fraction of max_new_tokens, in which the overlong penalty grows linearly (DAPO, arXiv 2503.14476, eq. 13:
    0.2); 0: no overlong penalty."""
    overlong: NonNegative = 1.0
    """Overlong penalty of a completion of max_new_tokens tokens (DAPO: 1)."""

    def _check(self) -> None:
        require(
            self.overlong_fraction > 0 or self.overlong == 1.0,
            f"algorithm.penalties.overlong needs overlong_fraction above 0, got {self.overlong} and 0: give for "
            "example --algorithm.penalties.overlong_fraction 0.2",
        )


class DynamicSamplingConfig(Settings):
    """Replaces prompts whose completions all have the same score, and therefore no gradient (DAPO, arXiv 2503.14476,
    eq. 11).
    """

    max_refills: Natural = 10
    """Maximum number of rounds of additional prompts per step; the step then trains on the accepted prompts."""


SamplerRatio = Literal["token", "sequence", "geometric"]
"""What a ratio p(training) / p(sampler) is of: a token, a completion (the product), or a completion's geometric
mean."""


LossNormalization = Literal["token", "sequence", "sequence_sum", "fixed"]


class RejectionConfig(Settings):
    """Completions whose ratio p(training) / p(sampler) is outside [low, high] have weight 0."""

    ratio: SamplerRatio = "geometric"
    """Ratio of a completion: its geometric mean, its product (sequence), or that of any token."""
    high: Annotated[float, Interval(ge=1)] = 1.001
    """Largest ratio (geometric, 1.001: verl's rollout_corr.md)."""
    low: Share | None = None
    """Smallest ratio; null: 1 / high."""

    @property
    def bounds(self) -> Bounds:
        """Smallest and largest ratio."""
        return 1 / self.high if self.low is None else self.low, self.high


class CorrectionConfig(Settings):
    """Importance weights p(training) / p(sampler), for samples from older or lower-precision weights."""

    ratio: SamplerRatio = "token"
    """Weight of a token: its own ratio; the product over its completion (sequence), which is unbiased where nothing is
    cut; or that product's geometric mean. gspo and vespo: sequence, if the section is left out."""
    method: Literal["truncate", "mask"] = "truncate"
    """truncate: weights are truncated at clip (TIS); mask: weights outside [low, clip] become 0 (IcePop; of sequences:
    MIS)."""
    clip: Annotated[float, Interval(ge=1)] = 2.0
    """Largest weight (2: TIS, fengyao.notion.site/off-policy-rl)."""
    low: Share | None = advanced(None)
    """Smallest weight of method mask; null: 1 / clip."""
    reject: RejectionConfig | None = advanced(None)
    """Reject whole completions by a ratio, besides their weights."""
    count_masked: bool = advanced(True)
    """Masked tokens stay in the denominator of the loss (IcePop), or not (slime, verl)."""

    def _check(self) -> None:
        if self.method != "mask":
            unread = ["low", "count_masked"] if self.reject is None else ["low"]
            rule = f"algorithm.correction.method {self.method} masks nothing"
            require_defaults(self, unread, rule, prefix="algorithm.correction.")

    @property
    def bounds(self) -> Bounds:
        """Smallest weight of method mask, and the largest weight."""
        return 1 / self.clip if self.low is None else self.low, self.clip


class EntropyConfig(Settings):
    """Control of the actor's entropy."""

    method: Literal["clip_cov", "kl_cov", "adaptive"] = "clip_cov"
    """Some tokens whose log-prob and advantage covary most have no policy gradient (clip_cov), or a penalty of their
    change (kl_cov; both: arXiv 2505.22617, section 4); adaptive: the entropy bonus follows a target (Skywork-OR1,
    arXiv 2505.22312)."""
    share: PositiveShare | None = None
    """Share of a rollout's response tokens that clip_cov (null: 2e-4) or kl_cov (null: 2e-3) selects (the paper)."""
    bounds: Bounds = (1.0, 5.0)
    """Covariances of the tokens from which clip_cov selects at random ([1, 5]: the paper); kl_cov selects the highest
    ones."""
    coef: Positive = 1.0
    """Weight of the penalty |log p / p_old| of kl_cov (1: the paper)."""
    target: Positive = 0.2
    """Entropy per token, in nats, below which adaptive raises the coefficient of the entropy bonus, and above which it
    lowers it and adds no bonus (0.2: Skywork-OR1)."""
    step: Positive = 0.0001
    """Change of the coefficient per rollout (1e-4: the scripts of Skywork-OR1)."""

    def _check(self) -> None:
        read_keys = {"clip_cov": ("share", "bounds"), "kl_cov": ("share", "coef"), "adaptive": ("target", "step")}
        unread = vars(self).keys() - {"method", *read_keys[self.method]}
        rule = f"algorithm.entropy.method {self.method} reads {' and '.join(read_keys[self.method])} only"
        require_defaults(self, sorted(unread), rule, prefix="algorithm.entropy.")
        require(
            self.bounds[0] <= self.bounds[1],
            f"algorithm.entropy.bounds is [low, high], got {list(self.bounds)}: exchange them",
        )

    @property
    def selected_share(self) -> float | None:
        """Share of the tokens that are selected; None if the method selects none."""
        default = {"clip_cov": 2e-4, "kl_cov": 2e-3}.get(self.method)
        return default if self.share is None else self.share


class AlgorithmConfig(Settings):
    """Settings of all RL algorithms."""

    papers = {
        "dppo": "give ppo or grpo, and algorithm.clip_of probability",
        "luspo": "give gspo, and algorithm.loss_normalization sequence_sum",
        "maxrl": "give grpo, and algorithm.divide_by_mean true",
    }
    """Advice for the names of papers that are a setting of other algorithms."""
    needs_critic = False
    """True if it trains a critic."""
    needs_reference = False
    """True if its loss needs the reference even without a KL penalty."""
    learns_pairs = False
    """True if it learns from pairs of completions."""
    selects = False
    """True if it learns from only some completions of a prompt."""
    uses_sampler_policy = True
    """True if its gradient is that of the policy that sampled, so that training should route tokens as sampling did."""
    single_update = False
    """True if its paper makes one update per rollout; the clip of other algorithms needs several to have an effect."""
    fewest_completions = 1
    """Smallest number of completions per prompt that it can learn from."""
    takes_sequences = True
    """True if a prompt may have any number of completions, like the sequences of a program's episodes."""
    defaults_elsewhere: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Defaults that it changes in other sections, by dotted key."""

    name: ClassVar[str] = ""
    """RL algorithm; it selects the keys of this section and their defaults (docs/algorithms.md)."""
    epochs: Count = 1
    """Passes over each rollout (1: verl)."""
    mini_batches: Count = 4
    """Optimizer updates per pass over a rollout (4: verl); if left out, the largest divisor of the rollout up to the
    default."""
    target_kl: Positive | None = advanced(None)
    """Stop the passes over a rollout once the approximate KL of a mini-batch, in nats, exceeds this; null: never."""
    kl: KLConfig | None = section()
    penalties: PenaltiesConfig | None = section(missing_eos="auto")
    dynamic_sampling: DynamicSamplingConfig | None = None
    score_scaling: Literal["none", "running", "initial"] = "none"
    """Scale scores to mean 0 and standard deviation 1: running, with statistics of all scores so far (OpenRLHF);
    initial, with statistics of the initial actor's scores (InstructGPT)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with algorithm.entropy.method adaptive its first value."""

    @property
    def updates_once(self) -> bool:
        """True if a rollout makes one update, before which the actor still has the weights that sampled."""
        return self.epochs * self.mini_batches == 1

    @property
    def clip_is_idle(self) -> bool:
        """True if the algorithm clips ratios, but one update per rollout leaves all of them at 1."""
        return self.updates_once and not self.single_update

    @property
    def reads_old_logprobs(self) -> bool:
        """True if the actor scores a rollout before training on it: for several updates, or to count kept tokens."""
        return not (self.updates_once or self.reads_sampler)

    @property
    def reads_sampler(self) -> bool:
        """True if the old log-probs are those with which the rollout was sampled."""
        return False

    @property
    def defers_old_logprobs(self) -> bool:
        """True if the forward of the first update gives the old log-probs of its rows, which nothing needs before."""
        return self.reads_old_logprobs and (self.kl is None or self.kl.where == "loss")

    @property
    def uses_reference(self) -> bool:
        """True if the reference's log-probs are needed."""
        return self.kl is not None or self.needs_reference

    def actor_scores_rollout(self, *, other_sampler: bool, has_teacher: bool) -> bool:
        """Return True if the actor reads a rollout before training on it. Besides `reads_old_logprobs`, it does if a KL
        to reference or teacher would use log-probs from older weights or from other arithmetic than training's.
        """
        return self.reads_old_logprobs or ((self.uses_reference or has_teacher) and other_sampler)

    @property
    def allows_other_sampler(self) -> bool:
        """True if older or rounded weights may sample: the loss is corrected, or does not depend on the sampling
        policy."""
        return self.learns_pairs


class PolicyGradientConfig(AlgorithmConfig):
    """Settings of algorithms with a loss per token."""

    mask_truncated: bool = False
    """Exclude completions that do not end with EOS from the loss (DAPO, section 3.4), but not from metrics."""
    loss_normalization: LossNormalization = "token"
    """The actor's loss is a mean over tokens (DAPO), over sequences of their means (GRPO) or of their sums
    (sequence_sum; LUSPO, arXiv 2602.05261), or a sum divided by max_new_tokens per sequence (fixed; Dr. GRPO)."""
    correction: CorrectionConfig | None = None
    default_correction: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The correction where other weights than those that train sample."""
    entropy: EntropyConfig | None = advanced(None)
    old_logprobs: Literal["training", "sampler"] = advanced("training")
    """Denominator of the policy ratio: log-probs of the training forward, or those with which the rollout was sampled,
    which saves a pass; the first update compares them."""

    def _check(self) -> None:
        if self.old_logprobs == "sampler":
            rule = "algorithm.old_logprobs sampler takes the sampler's log-probs as the policy's"
            require(
                self.default_correction.get("ratio") != "sequence",
                f"{rule}, whose rounding adds up in the ratio of sequences of {self.name}: leave it out",
            )
            require(self.entropy is None, f"{rule}, without the entropy that algorithm.entropy needs: leave one out")
            require(self.correction is None, f"{rule}, which leaves algorithm.correction nothing: leave one out")
        require(
            self.entropy is None or self.entropy.method != "kl_cov" or not self.updates_once,
            "algorithm.entropy.method kl_cov penalizes changes since the first update of a rollout, got one update: "
            "give algorithm.mini_batches or algorithm.epochs 2 or more, or method clip_cov",
        )

    @property
    def reads_old_logprobs(self) -> bool:
        """True if the actor must score a rollout before training: for several updates, to count kept tokens, or to
        control the entropy."""
        return not (self.updates_once or self.reads_sampler) or self._counts_kept or self.entropy is not None

    @property
    def reads_sampler(self) -> bool:
        """As in AlgorithmConfig; the forward of a single update costs nothing and is exact."""
        return self.old_logprobs == "sampler" and not self.updates_once

    @property
    def defers_old_logprobs(self) -> bool:
        """As in AlgorithmConfig; with mask_truncated the rows of the first update are not known before."""
        needed = self._counts_kept or self.entropy is not None or self.mask_truncated
        return super().defers_old_logprobs and not needed

    @property
    def _counts_kept(self) -> bool:
        """True if the loss divides by the tokens that the correction keeps."""
        return self.correction is not None and not self.correction.count_masked

    @property
    def allows_other_sampler(self) -> bool:
        """True if the loss is corrected for older or rounded weights that sample."""
        return self.correction is not None


class SequenceMeanConfig(PolicyGradientConfig):
    """Settings of algorithms whose loss is a mean over sequences."""

    loss_normalization: LossNormalization = "sequence"


class ClippedConfig(PolicyGradientConfig):
    """Settings of algorithms that clip the policy ratio."""

    clip: Bounds = (0.2, 0.2)
    """The policy ratio is clipped to [1 - low, 1 + high] (0.2: PPO, arXiv 1707.06347)."""
    score_clip: Positive | None = advanced(None)
    """Scores are clipped to [-score_clip, score_clip] (DeepSpeed-Chat: 5); null: not clipped (TRL, verl)."""
    whiten_advantages: bool = False
    """Advantages of a rollout get mean 0 and variance 1, over all ranks."""
    whiten_shift_mean: bool = advanced(True)
    """Whitened advantages have mean 0; false: only the variance changes."""
    whiten_unbiased: bool = advanced(True)
    """Whitening divides by the count minus one (TRL, verl), or by the count (false; OpenAI's code of 2019)."""

    def _check(self) -> None:
        low, high = self.clip
        require(
            0 <= low <= 1 and high >= 0,
            f"algorithm.clip is [low, high] with low in [0, 1] and high 0 or more, got {list(self.clip)}: give for "
            "example [0.2, 0.2]",
        )
        require(
            self.whiten_advantages or self.whiten_shift_mean,
            "algorithm.whiten_shift_mean needs whiten_advantages, got False and whiten_advantages False: leave it out",
        )
        require(
            self.whitens or self.whiten_unbiased,
            "algorithm.whiten_unbiased needs whitening, got False and none: leave it out",
        )

    @property
    def whitens(self) -> bool:
        """True if advantages are whitened."""
        return self.whiten_advantages


class SurrogateConfig(ClippedConfig):
    """Settings of algorithms with PPO's clipped surrogate."""

    dual_clip: Annotated[float, Interval(gt=1)] | None = advanced(None)
    """Bound of the loss for negative advantages, as a multiple of the advantage (arXiv 1912.09729: 3); null: none."""
    clip_of: Literal["ratio", "probability"] = advanced("ratio")
    """What clip bounds: the policy ratio, or the change of a token's probability (probability; DPPO, arXiv 2602.04879),
    of which a rare token can make no large one."""

    def _check(self) -> None:
        require(
            self.clip_of == "ratio" or self.dual_clip is None,
            f"algorithm.dual_clip bounds ratios, got {self.dual_clip} with algorithm.clip_of probability: leave it out",
        )


class GroupConfig(AlgorithmConfig):
    """Settings of algorithms with advantages relative to a prompt's completions.

    By default there is no KL, and no penalty of a missing EOS: a program usually checks the answers, and rejects
    truncated ones.
    """

    fewest_completions = 2
    defaults_elsewhere = {"rollout.sampling.n": 8}

    kl: KLConfig | None = None
    penalties: PenaltiesConfig | None = None
    divide_by_std: bool = True
    """Advantages are divided by the standard deviation of a prompt's scores (GRPO), or not (Dr. GRPO)."""
    divide_by_mean: bool = advanced(False)
    """Advantages are divided by the mean of a prompt's scores instead (MaxRL, arXiv 2602.02710), which rarely solved
    prompts have small; a prompt whose mean is not above 0 is not learned from."""


class SingleUpdateConfig(AlgorithmConfig):
    """Settings of algorithms whose paper makes one update per rollout."""

    single_update = True

    mini_batches: Count = 1
    """Optimizer updates per pass over a rollout (1: the paper)."""
