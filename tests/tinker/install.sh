#!/usr/bin/env bash
# Builds an environment with Tinker's client and cookbook (Apache-2.0) for tests/tinker, unless it is there:
# $HYBRID_RLHF_TINKER_ENV, by default in the user's cache. About 1.5 GiB, and minutes. The cookbook names a newer
# tml-renderers than the registry has, which its training loops do not need.
set -euo pipefail
. "$(dirname "$0")/../support/environment.sh" tinker "${HYBRID_RLHF_TINKER_ENV:-}"
"$folder/bin/pip" install -q tinker==0.38.0
"$folder/bin/pip" install -q --no-deps tinker-cookbook==0.6.1 tml-renderers==0.2.1
"$folder/bin/pip" install -q aiohttp blobfile chz cloudpickle datasets peft pillow termcolor tiktoken 'transformers>=5.5,<6'
"$folder/bin/python" -c 'import tinker_cookbook.rl.train, tinker_cookbook.supervised.train; print("tinker-cookbook")'
touch "$folder/.complete"
