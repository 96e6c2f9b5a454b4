"""hybrid_rlhf: supervised fine-tuning, reward models, preference learning and RL of causal language models.

Each step of the pipeline is a class: `SFT`, `RewardModel`, `PreferenceTuning`, `RL`. `GenerationEngine` generates.
Names are imported when they are first used, so that `import hybrid_rlhf` is quick.

Source: InstructGPT (Ouyang et al. 2022, arXiv 2203.02155), figure 2.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_rlhf.configs.errors import UserError as UserError
    from hybrid_rlhf.configs.preference import PreferenceStepConfig as PreferenceStepConfig
    from hybrid_rlhf.configs.reward import RewardConfig as RewardConfig
    from hybrid_rlhf.configs.rl import RLConfig as RLConfig
    from hybrid_rlhf.configs.sections.sampling import SamplingParams as SamplingParams
    from hybrid_rlhf.configs.sft import SFTConfig as SFTConfig
    from hybrid_rlhf.generation import Completion as Completion
    from hybrid_rlhf.generation import GenerationEngine as GenerationEngine
    from hybrid_rlhf.loop.step import TrainResult as TrainResult
    from hybrid_rlhf.rl.algorithms import Algorithm as Algorithm
    from hybrid_rlhf.rl.environments import Environment as Environment
    from hybrid_rlhf.rl.parts import RLParts as RLParts
    from hybrid_rlhf.rl.parts import RLSession as RLSession
    from hybrid_rlhf.rl.types import Batch as Batch
    from hybrid_rlhf.rl.types import Rollout as Rollout
    from hybrid_rlhf.rl_step import RL as RL
    from hybrid_rlhf.supervised.build import RewardModel as RewardModel
    from hybrid_rlhf.supervised_step import SFT as SFT
    from hybrid_rlhf.supervised_step import PreferenceTuning as PreferenceTuning

__version__ = "0.1.0"
_MODULES = {
    "Algorithm": "rl.algorithms",
    "Batch": "rl.types",
    "Completion": "generation",
    "Environment": "rl.environments",
    "GenerationEngine": "generation",
    "PreferenceStepConfig": "configs.preference",
    "PreferenceTuning": "supervised_step",
    "RL": "rl_step",
    "RLConfig": "configs.rl",
    "RLParts": "rl.parts",
    "RLSession": "rl.parts",
    "RewardConfig": "configs.reward",
    "RewardModel": "supervised.build",
    "Rollout": "rl.types",
    "SFT": "supervised_step",
    "SFTConfig": "configs.sft",
    "SamplingParams": "configs.sections.sampling",
    "TrainResult": "loop.step",
    "UserError": "configs.errors",
}
__all__ = [
    "RL",
    "SFT",
    "Algorithm",
    "Batch",
    "Completion",
    "Environment",
    "GenerationEngine",
    "PreferenceStepConfig",
    "PreferenceTuning",
    "RLConfig",
    "RLParts",
    "RLSession",
    "RewardConfig",
    "RewardModel",
    "Rollout",
    "SFTConfig",
    "SamplingParams",
    "TrainResult",
    "UserError",
]

# DeepSpeed warns on its first import that it found no GPU; the log of a run names the device already.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
# bitsandbytes, which peft imports where it is installed, asks for a package whose kernel this library does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "kernels-community" not in record.getMessage()
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
