"""hybrid_rlhf: supervised fine-tuning, reward model and PPO on one hybrid engine.

Source: InstructGPT (Ouyang et al. 2022, arXiv 2203.02155), figure 2.
"""

import logging

__version__ = "0.1.0"

# DeepSpeed warns on its first import, whoever imports it, that it found no GPU; the plan of a run says so already.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
