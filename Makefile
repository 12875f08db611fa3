# `make demo` and `make test` set up all that they need: a virtual environment in .venv, by uv, which is installed into
# a small environment of its own when it is not on the PATH.

SHELL := /bin/bash
# For uv: an interpreter, or a version such as 3.11, which the shell does not know
PYTHON ?= python3
BIN := .venv/bin
UV := $(shell command -v uv 2>/dev/null || echo .venv-uv/bin/uv)
# One thread for each process: the models of demo and tests are tiny
export OMP_NUM_THREADS ?= 1
# Where it is set, every process compiles torch, transformers and diffusers: 22 s of an import in place of 9
unexport PYTHONDONTWRITEBYTECODE
LINTED := paco_trl examples tests benchmarks model_cards docs/*.py
# No test runs the benchmarks: that they call the package as it is now is checked, not that their types are exact
CALLS_ONLY := --cache-dir=.mypy_cache/benchmarks --follow-imports=silent --no-warn-unused-ignores $(addprefix --disable-error-code=,arg-type assignment \
    call-overload import-untyped index list-item method-assign misc type-var union-attr var-annotated)

.PHONY: help demo test test-slow simulated-cuda test-cuda test-lowest test-vllm gpu full-size docs options quality lint types types-of-benchmarks \
	style clean

help:
	@echo "make demo         the whole method on toy models, into demo-output/ (CPU, offline)"
	@echo "make test         the tests"
	@echo "make test-slow    the tests that take seconds, or launch many processes"
	@echo "make test-cuda    the tests on a simulated GPU (g++ builds it)"
	@echo "make test-lowest  the tests with the lowest versions that setup.cfg admits"
	@echo "make test-vllm    the tests that need a server of vLLM (CPU; installs 2.5 GB into an environment of its own)"
	@echo "make gpu          what only an NVIDIA GPU can show and measure, into gpu-output/ (offline, 30 minutes)"
	@echo "make full-size    RECIPE=name: its command with the real configs and random weights, on a CPU (hours, 17 to 34 GB of disk)"
	@echo "make docs         the site, into site/ (installs what builds it into an environment of its own)"
	@echo "make options      what the command line knows of the configs, after a change of their options"
	@echo "make quality      linter, formatter and type checker, check only"
	@echo "make style        linter and formatter, with corrections"

.venv-uv/bin/uv:
	python3 -m venv .venv-uv
	.venv-uv/bin/pip install --quiet uv

# Made again when the dependencies change. CONSTRAINTS= installs the newest of all.
CONSTRAINTS ?= --constraints .ci/constraints.txt
.venv/.installed: setup.cfg pyproject.toml .ci/constraints.txt | $(filter .venv-uv/bin/uv,$(UV))
	@echo "Installing everything into .venv, once: a download of a few GB."
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv
	$(UV) pip install --python $(BIN)/python $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: .venv/.installed
	@$(BIN)/python examples/miniature/demo.py
	@echo "With edits instead of sets: $(BIN)/python examples/miniature/demo.py --world edits --output_dir demo-edits"

# Two processes, each with whole files, whose models are built once (three took longer on two cores). In the order
# of their names: by default the files with the fewest tests come last, which are the longest.
MARK ?= not slow and not vllm and not gpu and not cuda
test: .venv/.installed
	$(BIN)/python -m pytest -m "$(MARK)" -n 2 --dist loadfile --no-loadscope-reorder tests

test-slow:
	$(MAKE) test MARK=slow

# What `test-cuda` builds first
simulated-cuda: .venv/.installed
	$(BIN)/python tests/simulated_cuda -c ""

# Nothing is compiled there: Triton would look for a real driver
test-cuda: .venv/.installed
	$(BIN)/python tests/simulated_cuda -m pytest -n 2 --dist worksteal tests/test_gpu.py tests/test_simulated_gpu.py \
		tests/test_waits.py --deselect tests/test_gpu.py::test_compiled_blocks

test-lowest: | $(filter .venv-uv/bin/uv,$(UV))
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-lowest
	$(UV) pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e ".[test]"
	.venv-lowest/bin/python -m pytest -m "$(MARK)" -n 2 --dist loadfile --no-loadscope-reorder tests

# By pip, since uv does not find the CPU build of torch that vLLM pins. The packages that are taken out again come as
# CUDA builds, which do not load next to it, and nothing here uses them.
.venv-vllm/.installed: tests/vllm_environment/requirements.txt | $(filter .venv-uv/bin/uv,$(UV))
	$(UV) venv --quiet --clear --seed --python $(PYTHON) .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -r $<
	.venv-vllm/bin/pip uninstall --quiet --yes torchaudio torchcodec triton
	touch $@

test-vllm: .venv/.installed .venv-vllm/.installed
	cp tests/vllm_environment/vllm .venv-vllm/bin/vllm
	cp tests/vllm_environment/sitecustomize.py .venv-vllm/lib/python3*/site-packages/
	PACO_TRL_VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(BIN)/python -m pytest -rP -m vllm tests/test_vllm.py

# By $(PYTHON) where that has everything, so that a machine without network needs no virtual environment. The thread limit
# above is not for it. STEPS="flux-512 training" runs some of the steps, MINUTES=9 bounds all of them, OUT=directory.
ifneq ($(filter gpu,$(MAKECMDGOALS)),)
FOUND := $(shell $(PYTHON) -c "from importlib.util import find_spec as f; print(*['yes'] * all(map(f, ('trl', 'diffusers', 'peft'))))" 2>/dev/null)
endif
gpu:
	@python3 -c "import ctypes; ctypes.CDLL('libcuda.so.1')" 2>/dev/null || \
		{ echo "make gpu needs an NVIDIA GPU, and this machine has no CUDA driver." >&2; exit 1; }
	$(if $(FOUND),,$(MAKE) .venv/.installed)
	env -u OMP_NUM_THREADS $(if $(FOUND),$(PYTHON),$(BIN)/python) benchmarks/gpu/gpu.py --output $(or $(OUT),gpu-output) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(STEPS),--steps $(STEPS))

full-size: .venv/.installed
	env -u OMP_NUM_THREADS $(BIN)/python benchmarks/full_size/full_size.py $(RECIPE) \
		$(if $(TOKENIZERS),--tokenizers $(TOKENIZERS)) $(OPTIONS)

# The group alone: mkdocstrings reads the package without importing it
.venv-docs/.installed: pyproject.toml | $(filter .venv-uv/bin/uv,$(UV))
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-docs
	$(UV) pip install --quiet --python .venv-docs/bin/python --group docs
	touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

options: .venv/.installed
	PYTHONPATH=. $(BIN)/python tests/config_options.py

# Parts that `make -j 2` runs at the same time
quality: lint types types-of-benchmarks

lint: .venv/.installed
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)

types: .venv/.installed
	$(BIN)/mypy

types-of-benchmarks: .venv/.installed
	MYPYPATH=$(shell echo benchmarks/*/ examples tests | tr ' ' :) $(BIN)/mypy benchmarks/*/*.py benchmarks/miniature/claims $(CALLS_ONLY)

style: .venv/.installed
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

clean:
	rm -rf .venv .venv-uv .venv-lowest .venv-vllm .venv-docs demo-output demo-edits gpu-output full-size site build dist *.egg-info
