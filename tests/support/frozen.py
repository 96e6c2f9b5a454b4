"""What the fork server imports last: what each run of training reads once, and no collection of garbage looks at again.

A collection in a forked process would write to the page of every object that was imported, and so copy all of them.
"""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path

import deepspeed.ops
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.loop.report.writing import compiled
from hybrid_rlhf.runtime.command_line import parse_config
from hybrid_rlhf.runtime.environment import versions
from tests.support import shortened  # noqa: F401 - imported for its effect
from tests.support.steps import MODULES, step_line

for name, kind in {"sft": SFTConfig, "reward": RewardConfig, "ppo": RLConfig}.items():
    import_module(MODULES[name])
    parse_config(kind, step_line(name, Path("run"), Path("model"), Path("rows")))  # reads the types of all keys
get_checkpoint_conversion_mapping("llama")  # builds the table of all types
versions()
deepspeed.ops.__compatible_ops__  # noqa: B018 - compiles a program in the first engine of a process
compiled("page.html.j2")
gc.collect()
gc.freeze()
