#!/usr/bin/env bash
# Builds an environment with lm-evaluation-harness and Inspect (both MIT) for tests/evals, unless it is there:
# $HYBRID_RLHF_EVALS_ENV, by default in the user's cache. About 1.7 GiB, and minutes.
set -euo pipefail
cache="${XDG_CACHE_HOME:-$HOME/.cache}"
folder="${HYBRID_RLHF_EVALS_ENV:-$cache/hybrid_rlhf/evals}"
python="${PYTHON:-python3.11}"
[ ! -e "$folder/.complete" ] || exit 0
"$python" -m venv "$folder"
"$folder/bin/pip" install -q torch==2.13.0
"$folder/bin/pip" install -q 'lm-eval[api]==0.4.13' inspect-ai==0.3.285 openai accelerate 'transformers>=5.5,<6'
"$folder/bin/python" -c 'import inspect_ai, lm_eval.models.huggingface; print("lm-eval", lm_eval.__version__)'
touch "$folder/.complete"
