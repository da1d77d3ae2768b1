# make chat   set up .venv, fetch the default model, open the chat
# make serve  the same, then serve it: OpenAI's protocol at 127.0.0.1:8000
# make test   ruff, mypy, pytest
# make size   lines of code by folder, and since a commit: BASE=COMMIT
# make test-gpu  tests on a CUDA GPU, including those that need one
# TORCH=...        the torch to install, in any form that pip accepts: TORCH="torch==2.11.0", TORCH=/path/to/torch.whl
# TORCH_INDEX=...  its package index: the address on PyTorch's installation page for your platform

TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTHON ?= python3
MODEL ?=
BASE ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
BRIEFLY := sed -un -e '/\.metadata/d' -e '/Downloading\|Using cached\|Processing/p' -e 's/^Installing.*/Installing them/p'
SHELL := bash
.SHELLFLAGS := -o pipefail -c
HAS_DRIVER := $(shell command -v nvidia-smi || ls -d /proc/driver/nvidia 2>/dev/null)

# pip compiles none of the 13,000 modules: most are never imported. Python caches the ones that it compiles.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: chat serve test test-fast test-gpu lint format bench parity soak mutants size clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch is installed first and alone: otherwise pip would choose the largest build. On Linux the public index has only the
# CUDA build. If there is no driver for it, and pip would install it (it lists NVIDIA's libraries), uv installs the CPU
# build, because it knows PyTorch's own indexes.
$(VENV)/torch: pyproject.toml | $(BIN)/python
ifneq ($(TORCH_INDEX),)
	@echo "minillm: installing $(TORCH) from $(TORCH_INDEX)"
	$(INSTALL) --index-url "$(TORCH_INDEX)" "$(TORCH)"
else ifneq ($(HAS_DRIVER),)
	@echo "minillm: installing $(TORCH) for the NVIDIA driver of this machine: several GB (TORCH_INDEX=... for another build)"
	$(INSTALL) "$(TORCH)"
else
	@echo "minillm: no NVIDIA driver here: installing $(TORCH) for CPUs, 0.2 GB (TORCH_INDEX=... for another build)"
	@if $(INSTALL) --quiet --dry-run --report - "$(TORCH)" | grep -q '"name": "nvidia-'; then set -x; \
	  $(INSTALL) --quiet uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "$(TORCH)"; \
	else set -x; $(INSTALL) "$(TORCH)"; fi
endif
	touch $@

$(VENV)/installed: $(VENV)/torch
	@echo "minillm: installing the other packages: 0.4 GB, most of it Triton"
	@$(INSTALL) --editable ".[serve]" | $(BRIEFLY)
	touch $@

$(VENV)/installed-dev: $(VENV)/torch
	@echo "minillm: installing the other packages, and those for development: 0.5 GB, most of it Triton"
	@$(INSTALL) --editable ".[serve,dev]" | $(BRIEFLY)
	touch $(VENV)/installed $@

chat: $(VENV)/installed
	$(BIN)/minillm chat $(if $(MODEL),--model $(MODEL))

serve: $(VENV)/installed
	$(BIN)/minillm serve $(MODEL)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each process has one thread: small tensors gain nothing from two threads, which wait for each other. There are four
# processes on two cores, because many tests wait for a process or a clock.
# The default weights are downloaded first, so that a failed download is one error instead of fifty failed tests.
# Hypothesis draws the same examples in each run, by its CI profile; `make soak` draws others, and four times as many.
# The report ends with the slowest tests and the time of each test folder.
test: lint
	$(BIN)/minillm pull
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 4 --dist worksteal --hypothesis-profile=ci --durations=15 \
	    -m "not parity and not soak and not gpu"

test-fast: $(VENV)/installed-dev
	$(BIN)/pytest -m "not slow and not weights and not parity and not soak and not gpu"

# Compiles the Triton kernels instead of interpreting them, and runs the engine's tests on the GPU if there is one. Most of
# the time of a first run is compilation, by eight processes. An engine takes most of the GPU's memory, so only one runs.
test-gpu: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 8 --dist worksteal -m "not parity and not soak and not weights" \
	    tests/kernels tests/model
	$(BIN)/pytest -m "not parity and not soak and not weights" tests/engine

parity: $(VENV)/installed-dev
	$(BIN)/minillm pull
	$(BIN)/pytest tests/parity

# Long random runs: cache operations, requests, typing in the chat. Then new examples for all Hypothesis tests.
soak: $(VENV)/installed-dev
	$(BIN)/pytest -m soak
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 4 --dist worksteal -m "hypothesis and not parity and not soak and not gpu"

# Seeded faults: each must make a test fail. MUTANTS="--only NAME", "--jobs N", "--list"
# Then 200 random mutations: 90 % must make a test fail. MUTATE="--only NAME", "--jobs N", "--reach FILE" (cached coverage)
mutants: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(MUTANTS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutate.py $(MUTATE)

bench: $(VENV)/installed
	$(BIN)/minillm bench latency --shape smollm2-135m

size: $(VENV)/installed-dev
	@$(BIN)/python tests/size.py $(BASE)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
