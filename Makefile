# make chat   set up .venv, fetch the default model, open the chat
# make test   ruff, mypy, pytest
# make test-gpu  the same on a CUDA GPU, with the tests that only run there
# TORCH=...   which torch pip installs; anything pip takes: TORCH="torch==2.11.0", TORCH=/path/to/torch.whl

TORCH ?= torch==2.13.0
PYTHON ?= python3
MODEL ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: chat test test-fast test-gpu lint format bench parity soak clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first, alone: otherwise pip would resolve it to the largest build it knows.
$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

chat: $(VENV)/installed
	$(BIN)/minillm chat $(if $(MODEL),--model $(MODEL))

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two processes of one thread each: small tensors gain nothing from two threads, and lose by waiting for each other.
# The default weights are fetched first, so that a failed download reads as one and not as fifty failed tests.
test: lint
	$(BIN)/minillm pull
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not parity and not soak and not gpu"

test-fast: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not slow and not weights and not parity and not soak and not gpu"

# The Triton kernels compiled, not interpreted, and everything that runs the engine on the GPU where there is one.
test-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not parity and not soak and not weights" tests/kernels tests/model tests/engine

parity: $(VENV)/installed-dev
	$(BIN)/minillm pull
	$(BIN)/python -m pytest tests/parity

# Long random work: operations on the books of the cache, requests, typing at the chat.
soak: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m soak

bench: $(VENV)/installed
	$(BIN)/minillm bench latency --shape smollm2-135m

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
