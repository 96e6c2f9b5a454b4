"""Generation from a causal LM: prompts in, completions out. Knows nothing of training."""

from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams

__all__ = ["Completion", "GenerationEngine", "SamplingParams"]
