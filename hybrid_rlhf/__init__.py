"""hybrid_rlhf: supervised fine-tuning, reward model and PPO on one hybrid engine.

Source: InstructGPT (Ouyang et al. 2022, arXiv 2203.02155), figure 2.
"""

__version__ = "0.1.0"
