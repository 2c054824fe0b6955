PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv/bin

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

test: lint ## lint, and all tests
	$(VENV)/python -m pytest

format: env ## let ruff format and fix
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .

clean: ## remove all that the other commands made
	rm -rf .venv .demo .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help env demo lint test format clean
