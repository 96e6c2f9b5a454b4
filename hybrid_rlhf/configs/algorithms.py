"""Settings of the RL algorithms: one dataclass per algorithm, with the keys that it reads and its own defaults.

`algorithm.name` selects the dataclass, so a key that an algorithm does not read cannot be set. Class attributes declare
the needs of an algorithm (a critic, a reference, several completions per prompt). The algorithms are in rl/algorithms/,
one file each; docs/algorithms.md compares them.

A new algorithm needs a dataclass in `RL_ALGORITHMS`, a file in rl/algorithms/ and a line in the registry there.
"""

from __future__ import annotations

from hybrid_rlhf.configs.sections.algorithm import (
    AlgorithmConfig,
    ClippedConfig,
    DynamicSamplingConfig,
    GroupConfig,
    KLConfig,
    LossNormalization,
    PenaltiesConfig,
    PolicyGradientConfig,
    SequenceMeanConfig,
    SingleUpdateConfig,
    SurrogateConfig,
)
from hybrid_rlhf.configs.sections.rules import (
    Bounds,
    Count,
    NonNegative,
    Positive,
    Share,
    advanced,
    require,
    require_defaults,
    section,
)


class ActorCriticConfig(SurrogateConfig):
    """Settings of algorithms with a critic: a discount of 1, as InstructGPT (arXiv 2203.02155), and whitened
    advantages."""

    needs_critic = True

    gamma: Share = 1.0
    """Discount per token (1: InstructGPT)."""
    value_clip: NonNegative = 0.0
    """Largest change of values per rollout (verl, OpenRLHF: 0.5); 0: not clipped."""
    whiten_advantages: bool = True
    """Advantages of a rollout get mean 0 and variance 1, over all ranks (N details, no. 18)."""
    whiten_rewards: bool = advanced(False)
    """Rewards of a rollout get variance 1 and keep their mean, over all ranks (N details, no. 18)."""

    @property
    def whitens(self) -> bool:
        """True if advantages or rewards are whitened."""
        return self.whiten_advantages or self.whiten_rewards


class PPOConfig(ActorCriticConfig):
    """PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic, as in InstructGPT (arXiv 2203.02155).

    Discount and lambda of 1 follow verl, OpenRLHF and arXiv 2503.01491; whitened advantages N details, no. 18.
    """

    name = "ppo"
    gae_lambda: Share = 1.0
    """Lambda of the actor's advantages (GAE, arXiv 1506.02438; 1: verl, OpenRLHF, arXiv 2503.01491)."""


class VAPOConfig(ActorCriticConfig):
    """VAPO (Yue et al. 2025, arXiv 2504.05118): PPO whose lambda grows with the completion, a pretrained critic, a
    likelihood term for completions with a positive score, a higher upper clip, no KL."""

    defaults_elsewhere = {"rollout.sampling.n": 16, "critic.warmup_steps": 50}

    name = "vapo"
    kl: KLConfig | None = None
    penalties: PenaltiesConfig | None = None
    clip: Bounds = (0.2, 0.28)
    """The policy ratio is clipped to [1 - low, 1 + high] ([0.2, 0.28]: the paper)."""
    length_alpha: Positive = 0.05
    """The actor's lambda is 1 - 1 / (length_alpha * tokens of the completion), at least 0 (0.05: the paper)."""
    positive_coef: NonNegative = 0.1
    """Weight of the negative log-likelihood of completions with a score above 0 (0.1: the paper); 0: none."""


class ReinforceConfig(SingleUpdateConfig, SurrogateConfig):
    """REINFORCE with a moving average as baseline (Ahmadian et al. 2024, arXiv 2402.14740, eq. 4 and 5)."""

    name = "reinforce"


class RLOOConfig(SingleUpdateConfig, SurrogateConfig):
    """RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2)."""

    fewest_completions = 2
    defaults_elsewhere = {"rollout.sampling.n": 4}

    name = "rloo"


class ReMaxConfig(SingleUpdateConfig, SurrogateConfig):
    """ReMax (Li et al. 2023, arXiv 2310.10505): the greedy completion's score is the baseline."""

    takes_sequences = False
    name = "remax"


class ReinforcePPConfig(SurrogateConfig):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): returns to go, whitened over the rollout; KL coefficient 0.01."""

    name = "reinforce_pp"
    gamma: Share = 1.0
    """Discount per token (1: the paper)."""
    whiten_advantages: bool = True
    """Advantages of a rollout get mean 0 and variance 1, over all ranks (the paper, eq. 9)."""
    kl: KLConfig | None = section(coef=0.01)


class ReinforcePPBaselineConfig(ReinforcePPConfig):
    """REINFORCE++ with the mean of a prompt's completions as baseline (arXiv 2501.03262, section 3.2), KL in the
    loss."""

    fewest_completions = 2
    takes_sequences = False
    defaults_elsewhere = {"rollout.sampling.n": 8}

    name = "reinforce_pp_baseline"
    kl: KLConfig | None = section(coef=0.01, where="loss", estimator="k2")
    penalties: PenaltiesConfig | None = None


class GRPOConfig(GroupConfig, SequenceMeanConfig, SurrogateConfig):
    """GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1): KL 0.04 in the loss, a mean over sequences."""

    name = "grpo"
    kl: KLConfig | None = section(coef=0.04, where="loss", estimator="k3")


class DrGRPOConfig(GroupConfig, SurrogateConfig):
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2): no division by standard deviation or length, no KL."""

    name = "dr_grpo"
    divide_by_std: bool = False
    loss_normalization: LossNormalization = "fixed"


class DAPOConfig(GroupConfig, SurrogateConfig):
    """DAPO (Yu et al. 2025, arXiv 2503.14476): higher upper clip (eq. 8 and 10), dynamic sampling (eq. 11), a mean over
    tokens (eq. 12), overlong penalty (eq. 13), no KL.
    """

    name = "dapo"
    clip: Bounds = (0.2, 0.28)
    """The policy ratio is clipped to [1 - low, 1 + high] ([0.2, 0.28]: the paper)."""
    penalties: PenaltiesConfig | None = section(overlong_fraction=0.2)
    dynamic_sampling: DynamicSamplingConfig | None = section()


class GDPOConfig(GRPOConfig):
    """GDPO (Liu et al. 2026, arXiv 2601.05242): each component of the reward is standardized in the group; else as
    GRPO."""

    name = "gdpo"
    whiten_advantages: bool = True
    """Advantages of a rollout's completions get mean 0 and variance 1, over all ranks (the paper)."""

    def _check(self) -> None:
        unread = ("divide_by_std", "divide_by_mean", "score_scaling", "score_clip", "dynamic_sampling")
        require_defaults(self, unread, "algorithm gdpo standardizes each component of the reward", prefix="algorithm.")


class PassAtKConfig(GroupConfig, SurrogateConfig):
    """Pass@k training (Chen et al. 2025, arXiv 2508.10751): the reward is that of the best of k completions, no KL."""

    name = "pass_at_k"
    k: Count = 4
    """Number of completions of which the best counts; below rollout.sampling.n."""

    def _check(self) -> None:
        rule = "algorithm pass_at_k compares subsets of completions"
        require_defaults(self, ("divide_by_mean",), rule, prefix="algorithm.")


class GSPOConfig(GroupConfig, SequenceMeanConfig, SurrogateConfig):
    """GSPO (Zheng et al. 2025, arXiv 2507.18071): one ratio per sequence; clip bounds of section 5.1, no KL.

    Its loss is of sequences, and so is its correction: masked above 3, as in TRL (sequence_mask).
    """

    default_correction = {"ratio": "sequence", "method": "mask", "clip": 3.0, "low": 0.0}

    name = "gspo"
    clip: Bounds = (3e-4, 4e-4)
    """The ratio of a sequence is clipped to [1 - low, 1 + high] ([3e-4, 4e-4]: the paper)."""

    def _check(self) -> None:
        require_defaults(self, ("clip_of",), "algorithm gspo clips the ratio of a sequence", prefix="algorithm.")


class GMPOConfig(GroupConfig, SequenceMeanConfig, ClippedConfig):
    """GMPO (Zhao et al. 2025, arXiv 2507.20673): the geometric mean of clipped ratios, no KL."""

    name = "gmpo"
    clip: Bounds = (0.33, 0.49)
    """The ratio of a token is clipped to [1 - low, 1 + high] ([0.33, 0.49]: exp(-0.4) and exp(0.4), the paper)."""


class CISPOConfig(GroupConfig, ClippedConfig):
    """CISPO (MiniMax-M1 2025, arXiv 2506.13585, eq. 4 and 5); upper bound of 5 as in arXiv 2510.13786, no KL.

    Its correction truncates the weight of a token at the same bound.
    """

    default_correction = {"clip": 5.0}

    name = "cispo"
    clip: Bounds = (1.0, 4.0)
    """The weight of a token is clipped to [1 - low, 1 + high] ([1, 4]: no lower bound, ScaleRL, arXiv 2510.13786)."""


class SAPOConfig(GroupConfig, SequenceMeanConfig):
    """SAPO (Gao et al. 2025, arXiv 2511.20347): a sigmoid of the ratio in place of a clip, no KL."""

    name = "sapo"
    gate_temperatures: tuple[Positive, Positive] = (1.0, 1.05)
    """Steepness of the sigmoid for positive and for other advantages ([1, 1.05]: the paper)."""


class VESPOConfig(GroupConfig, PolicyGradientConfig):
    """VESPO (arXiv 2602.10693): a gate w^k exp(lambda (1 - w)) of the sequence's ratio w in place of a clip, no KL."""

    default_correction = GSPOConfig.default_correction

    name = "vespo"
    gate_power: tuple[Positive, Positive] = (2.0, 3.0)
    """k for advantages of 0 or more, and below 0 ([2, 3]: TRL)."""
    gate_decay: tuple[Positive, Positive] = (3.0, 2.0)
    """lambda for advantages of 0 or more, and below 0 ([3, 2]: TRL)."""


class OnlineDPOConfig(SingleUpdateConfig):
    """Online DPO (Guo et al. 2024, arXiv 2402.04792): pairs of completions, compared by the reward."""

    needs_reference = True
    learns_pairs = True
    uses_sampler_policy = False
    fewest_completions = 2
    takes_sequences = False
    defaults_elsewhere = {"rollout.sampling.n": 2}

    name = "online_dpo"
    beta: Positive = 0.1
    """Strength of the regularization to the reference (0.1: DPO, arXiv 2305.18290)."""
    kl: KLConfig | None = None
    score_clip: Positive | None = advanced(None)
    """Scores are clipped to [-score_clip, score_clip] (DeepSpeed-Chat: 5); null: not clipped (TRL, verl)."""


class RAFTConfig(SingleUpdateConfig, PolicyGradientConfig):
    """RAFT (Dong et al. 2023, arXiv 2304.06767): supervised learning on the best completions of each prompt.

    The default learning rate is that of SFT, for the loss is SFT's.
    """

    selects = True
    uses_sampler_policy = False
    fewest_completions = 2
    takes_sequences = False
    defaults_elsewhere = {"rollout.sampling.n": 8}

    name = "raft"
    kl: KLConfig | None = None
    selected_per_prompt: Count = 1
    """Number of best completions per prompt to train on (1: the paper)."""
    select_above: float | None = None
    """Train only on completions whose score, minus penalties, exceeds this; null: any."""

    def _check(self) -> None:
        require(
            self.kl is None or self.kl.where == "loss",
            "algorithm raft selects by scores, got algorithm.kl.where reward: give --algorithm.kl.where loss and "
            "--algorithm.kl.estimator k3",
        )
        require(
            self.entropy is None or self.entropy.method == "adaptive",
            "algorithm raft has equal advantages, which covary with nothing, got algorithm.entropy.method "
            f"{self.entropy and self.entropy.method}: give adaptive, or leave it out",
        )


RL_ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    kind.name: kind
    for kind in (
        PPOConfig,
        ReinforceConfig,
        RLOOConfig,
        ReMaxConfig,
        ReinforcePPConfig,
        ReinforcePPBaselineConfig,
        GRPOConfig,
        DrGRPOConfig,
        DAPOConfig,
        GDPOConfig,
        PassAtKConfig,
        GSPOConfig,
        GMPOConfig,
        CISPOConfig,
        SAPOConfig,
        VESPOConfig,
        VAPOConfig,
        OnlineDPOConfig,
        RAFTConfig,
    )
}
"""Every RL algorithm by its name."""
