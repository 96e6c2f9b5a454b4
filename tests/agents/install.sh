#!/usr/bin/env bash
# Builds an environment with agent programs (mini-SWE-agent, smolagents, OpenAI's Agents SDK) for tests/agents, unless it is
# there: $HYBRID_RLHF_AGENTS_ENV, by default in the user's cache. About 0.5 GiB; they pin another openai than this library.
set -euo pipefail
. "$(dirname "$0")/../support/environment.sh" agents "${HYBRID_RLHF_AGENTS_ENV:-}" openai
"$folder/bin/pip" install -q mini-swe-agent==2.4.6 'smolagents[openai]==1.26.0' openai-agents==0.24.0
"$folder/bin/python" -c 'import agents, minisweagent, smolagents; print("mini-swe-agent, smolagents, openai-agents")'
touch "$folder/.complete"
