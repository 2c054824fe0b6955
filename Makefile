PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv/bin
# Two tests at once, each on one core; the tests of a file one after another, since they share what is costly to make.
PYTEST := OMP_NUM_THREADS=1 $(VENV)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
TESTS_033 ?= tests/test_contract.py tests/test_plugin.py tests/test_loading.py tests/test_server.py $(wildcard tests/test_engine*.py)

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## make .venv: vLLM for CPUs, this package, its test tools
	@$(PYTHON) scripts/setup_cpu_env.py

demo: env ## serve a tiny random checkpoint and show one streamed answer
	@$(VENV)/python scripts/demo.py

lint: env ## ruff and mypy
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy vllm_dsv4

sources: env
	-@$(VENV)/python scripts/fetch_vllm_sources.py

test: lint sources ## lint, and all tests
	$(PYTEST)

test-033: env ## the tests that start vLLM, on vLLM 0.33.0's Python code
	$(VENV)/python scripts/overlay_033.py
	PYTHONPATH=$(CURDIR)/.cache/vllm-0.33.0 $(PYTEST) $(TESTS_033)

format: env ## let ruff format and fix
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

clean: ## remove all that the other commands made
	rm -rf .venv .demo .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help env demo lint sources test test-033 format clean
