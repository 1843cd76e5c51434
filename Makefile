# make train   sets everything up and trains the main model (two processes on this machine)
# make test    sets everything up, then lints and runs the tests
# make help    all targets

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
    $(if $(shell $(name) -c 'import sys; print(int(sys.version_info >= (3, 11)))' 2>/dev/null | grep 1),$(name))) python3)
# What is installed where $(PYTHON) has no torch 2.11 to 2.15 of its own; pip's options may follow the requirement.
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
TORCHRUN := $(VENV)/bin/torchrun

# A rank is one thread of computation; more threads than cores make every rank slow.
export OMP_NUM_THREADS := 1
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

CPP := $(shell find csrc hip tests/cpp tests/cuda tests/hip -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BUILT := build/.built
# Tests run beside each other in so many processes, each with ranks of its own (tests/beside.py).
WORKERS ?= 2
SMOKE := $(addprefix tests/,test_examples.py symm_mem comm/test_symmetric_memory.py ops/test_primitives.py ops/test_compile.py \
    nn/test_linear.py nn/test_parameters.py nn/test_compile.py nn/test_torch_tools.py)

.PHONY: help
help:  ## say what the targets do
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 16

.PHONY: train
train: $(BUILT)  ## train the main model: 2 ranks, tensor parallel
	$(TORCHRUN) --nproc-per-node 2 -m pyruntime train --config main

PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
.PHONY: test
test: lint  ## lint, then the first tier of tests: what a person waits for (tests/tiers.py)
	$(PYTEST) --first-tier

.PHONY: test-second
test-second: $(BUILT)  ## the second tier: more cases, benches, packaging, compiled kernels; WITHIN=SECONDS ends it
	$(PYTEST) --second-tier $(if $(WITHIN),--time $(WITHIN))

.PHONY: test-all
test-all: test test-second  ## both tiers: all tests but those of the targets below

.PHONY: test-costs
test-costs: $(BUILT)  ## the first tier, and what each file of it costs into tests/costs.json
	$(PYTEST) --first-tier --write-costs

.PHONY: smoke
smoke: $(BUILT)  ## a few tests of everything that leans on torch: for a torch that is new here
	$(RUN) -m pytest $(SMOKE)

.PHONY: test-cuda
test-cuda: $(BUILT)  ## compile the CUDA kernels with nvcc and look at what became of them: minutes
	$(RUN) -m pytest -m nvcc tests/cuda

.PHONY: test-hip
test-hip: $(BUILT)  ## compile the portable kernels with hipcc and look at their instructions: minutes
	$(RUN) -m pytest -m hipcc tests/cuda

.PHONY: test-hip-run
test-hip-run: $(BUILT)  ## on a machine with GPUs of AMD: compile the kernels, run all of them, compare with fp64
	$(RUN) -m pytest -m hipcc -s tests/cuda/kernels/test_run_kernels.py

.PHONY: test-threads
test-threads: $(BUILT)  ## the C++ tests in which threads meet, under the thread sanitizer
	$(RUN) -m pytest -m threads tests/cpp

.PHONY: test-model
test-model: $(BUILT)  ## check the models of the protocol with spin
	$(RUN) -m pytest -m spin tests/model

.PHONY: test-architectures
test-architectures: $(BUILT)  ## plan "auto" on every architecture that transformers has a plan for
	$(RUN) tools/check_architectures.py --verbose

.PHONY: test-parity
test-parity: $(BUILT)  ## train on every mesh of at most 8 ranks and compare with one; writes bench/results/parity.md
	$(RUN) tools/check_parity.py --write bench/results/parity.md

.PHONY: test-kill
test-kill: $(BUILT)  ## kill -9 a run at fifty random moments and compare it with one never interrupted: minutes
	$(RUN) -m pytest -m kill -s -o faulthandler_timeout=0 tests/train/test_kill.py tests/cli/test_kills.py

.PHONY: test-mutations
test-mutations: $(BUILT)  ## damage ledgers, models, runs and options a thousand times each: a quarter of an hour
	$(RUN) -m pytest -m mutations -o faulthandler_timeout=0 tests/cli

.PHONY: test-install
test-install: $(BUILT)  ## install from the source distribution, which compiles all of it: many minutes
	$(RUN) -m pytest -m install tests/test_sdist.py

.PHONY: lint
lint: $(BUILT)  ## ruff, clang-format, mypy, hadolint; changes nothing
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP)
	$(RUN) -m mypy
	$(VENV)/bin/hadolint --ignore DL3008 --ignore DL3013 docker/*.Dockerfile  # any compiler, any build tool

.PHONY: format
format: $(BUILT)  ## rewrite the sources as the formatters want them
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

.PHONY: docs
docs: $(VENV)/.made  ## the site: build/docs/index.html; a broken link or docstring fails it
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

.PHONY: bench
bench: $(BUILT)  ## the linear benchmark on 2 ranks
	$(TORCHRUN) --nproc-per-node 2 -m bench.linear.run

.PHONY: build
build: $(BUILT)  ## the environment and the C++ core, built in place

# Not a part of `build`: docs/how-to/gpus.md says who builds it when.
.PHONY: cuda
cuda: $(VENV)/.made  ## the CUDA kernels, with nvcc; no GPU is needed
	$(RUN) tools/build_cuda.py

.PHONY: hip
hip: $(VENV)/.made  ## the kernels for GPUs of AMD, with hipcc; no GPU is needed
	$(RUN) tools/build_hip.py

# TORCH_WHEEL: what `pip download --no-deps torch==2.11.0` brings, or the folder where it is unpacked.
.PHONY: check-torch
check-torch: $(VENV)/.made  ## compile the core against the headers and symbols of TORCH_WHEEL, a torch that is not installed
	$(RUN) tools/check_torch.py $(TORCH_WHEEL)

# With the Python that has a torch for CUDA, and nothing downloaded: not a part of the environment above.
.PHONY: gpu-check
gpu-check:  ## on a machine with a GPU: build, test, measure; OUT=DIR takes copies of the report and the logs
	$(PYTHON) tools/gpu_check.py $(if $(OUT),--out $(OUT)) $(GPU_CHECK)

# The folders are prerequisites too: their time changes when a file goes away.
$(BUILT): $(VENV)/.made setup.py $(shell find csrc -type d -o -name '*.cpp' -o -name '*.h')
	$(RUN) setup.py --quiet build_ext --inplace
	@mkdir -p $(@D) && touch $@

$(VENV)/.made: pyproject.toml tools/make_venv.py tools/torch_versions.py
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) was found on PATH: install Python 3.11 or newer, on Debian and Ubuntu with 'apt-get install python3 python3-venv'." >&2; exit 1; }
	@$(PYTHON) tools/make_venv.py $(VENV) --torch "$(TORCH)"
	@touch $@

.PHONY: clean
clean:  ## remove what was built, the environment too
	rm -rf build dist $(VENV) *.egg-info pyruntime/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
