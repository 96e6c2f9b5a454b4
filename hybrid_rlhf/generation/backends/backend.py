"""What computes the completions of requests: one of three backends, with the same methods.

The engine turns prompts into requests and requests into completions. A backend decides which requests run together, and
owns their memory and the weights. `run` decodes requests to their end; tensor-parallel ranks pass them in the same
order. `run_open` decodes requests as they arrive, on one rank: it allocates its memory before it takes the first one,
and runs nothing else until it returns.
"""

from __future__ import annotations

from typing import Literal

from hybrid_rlhf.generation.backends.module import ModuleBackend
from hybrid_rlhf.generation.backends.native import NativeBackend
from hybrid_rlhf.generation.backends.vllm import VLLMBackend

BackendName = Literal["auto", "module"]
"""auto: native if the family table describes the model, else module; module: always the Hugging Face module."""
GenerationBackend = NativeBackend | ModuleBackend | VLLMBackend
