# Every target runs in .venv, which .ci/setup.sh makes on first use and skips from then on.
# Paths are relative, so that a checkout may lie under a path with spaces.

python := .venv/bin/python

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup venv demo test test-slow test-gpu check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

# .ci/setup.sh reads PYTHON from the environment, where make puts what the command line sets.
setup: ## make .venv, with all that demo and tests need; PYTHON=/path/to/python3.12 names its Python
	@sh .ci/setup.sh --show

venv:
	@sh .ci/setup.sh

demo: venv ## run the demo on this machine's CPU
	@$(python) -m megatron_longstraw demo

test: venv ## CPU tests, two files at a time
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(python) -m pytest -n 2 --dist loadfile

test-slow: venv ## the tests that take minutes
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(python) -m pytest -m slow

test-gpu: venv ## the tests that need a CUDA device
	@$(python) -m pytest -m gpu

check: venv ## lint, format and types
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy

clean: ## remove caches and build output; .venv stays (rm -rf .venv to have it made anew)
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	@find . \( -path ./.venv -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
