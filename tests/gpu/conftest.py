"""What cuBLAS reads when it starts: without it, torch refuses products under deterministic algorithms."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
