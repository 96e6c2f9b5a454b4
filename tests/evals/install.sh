#!/usr/bin/env bash
# Builds an environment with lm-evaluation-harness and Inspect (both MIT) for tests/evals, unless it is there:
# $HYBRID_RLHF_EVALS_ENV, by default in the user's cache. About 1.7 GiB, and minutes.
set -euo pipefail
. "$(dirname "$0")/../support/environment.sh" evals "${HYBRID_RLHF_EVALS_ENV:-}"
"$folder/bin/pip" install -q 'lm-eval[api]==0.4.13' inspect-ai==0.3.285 openai accelerate 'transformers>=5.5,<6'
"$folder/bin/python" -c 'import inspect_ai, lm_eval.models.huggingface; print("lm-eval", lm_eval.__version__)'
touch "$folder/.complete"
