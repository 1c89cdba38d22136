# `make` lists what there is. demo and test set up all they need, on a bare machine too.
VENV ?= .venv
export PYTHON TORCH TRAINERS VLLM
# One thread a process: the tests run side by side, and OpenMP threads on busy cores spin.
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
JOBS ?= 2
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

$(VENV)/.ready: pyproject.toml .ci/setup
	@bash .ci/setup $(VENV)

$(VENV)/.trainers: .ci/trainers | $(VENV)/.ready
	@bash .ci/trainers $(VENV)

setup: $(VENV)/.ready ## the virtual environment (VENV=.venv, PYTHON=python3, TORCH=2.13.0, VLLM=no)

demo: $(VENV)/.ready ## generate with tiny models, and compare every logprob with the training forward
	$(VENV)/bin/unified-models demo

test: lint $(VENV)/.trainers ## lint, types and all tests (JOBS=2, TRAINERS=no, PYTEST_ARGS="-k rope")
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -n $(JOBS) --maxschedchunk 1 $(PYTEST_ARGS)

test-gpu: ## what needs a GPU, in the environment at hand (GPU_PYTHON=python3, GPU_JOBS=8 with pytest-xdist)
	$(or $(GPU_PYTHON),python3) -m pytest -p no:cacheprovider -p no:benchmark -rA \
		$(if $(GPU_JOBS),-n $(GPU_JOBS) --maxschedchunk 1) tests/gpu

lint: $(VENV)/.ready ## ruff check, ruff format --check, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/.ready ## times of work that was first shown right
	$(VENV)/bin/unified-models bench
	$(VENV)/bin/unified-models bench --scan

clean: ## remove caches and builds; the virtual environment stays
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find unified_models adapters tests -name __pycache__ -type d -prune -exec rm -rf {} +
