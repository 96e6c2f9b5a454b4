"""Generation from a causal LM: prompts in, completions out. Independent of training.

Read `engine.py` first (the interface), then `backends/` (what computes: the library's decoder or the Hugging Face
module), `batching/continuous.py` (which requests decode together), `model/decoder.py` (one forward pass), `ops/` (the
operations in it), `weights/` (a Hugging Face model to inference weights) and `architecture/` (a model as numbers).
`chat.py` is a conversation, `open_batch.py` a batch that takes requests while it decodes. Each folder imports only from
those below it: engine, backends, batching, weights, model, ops, architecture.
"""

from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.generation.sampling import Completion, SamplingParams

__all__ = ["Completion", "GenerationEngine", "SamplingParams"]
