"""SFT and preference learning as Python objects, and as commands run them.

They are above `supervised/` and `rl/`, because evaluation by generation takes the sampling and the rewards of RL.
"""

from __future__ import annotations

from functools import partial

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.loop.step import Step
from hybrid_rlhf.rl.evaluation import prepare_evaluation
from hybrid_rlhf.supervised import build

run_sft = partial(build.run_sft, prepare=prepare_evaluation)
run_preference = partial(build.run_preference, prepare=prepare_evaluation)


class SFT(Step[SFTConfig]):
    """Supervised fine-tuning, or distillation with a `distill` section; see `Step` for the arguments."""

    config_type = SFTConfig

    def _run(self) -> None:
        run_sft(self.config, self.callbacks)


class PreferenceTuning(Step[PreferenceStepConfig]):
    """Preference learning without a reward model: DPO, or `algorithm="kto"` and others; see `Step`."""

    config_type = PreferenceStepConfig

    def _run(self) -> None:
        run_preference(self.config, self.callbacks)
