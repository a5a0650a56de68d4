# One command each; `make help` lists them.
#   EXTRAS=dev,cuda13 JAX_PLATFORMS=cuda make train     on a machine with GPUs
SHELL := bash
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
CONFIG ?= configs/tiny-mla-moe.yaml
ARGS ?=
# Test processes; each has eight virtual devices, so more than the cores are no gain.
WORKERS ?= 2
READY := $(VENV)/.ready-$(EXTRAS)

export JAX_PLATFORMS ?= cpu
export PYRIGHT_PYTHON_IGNORE_WARNINGS ?= 1
# Containers often set it; without compiled modules every new process spends five seconds on importing.
unexport PYTHONDONTWRITEBYTECODE

$(READY): pyproject.toml constraints.txt .ci/venv
	@PYTHON="$(PYTHON)" bash .ci/venv $(VENV) $(EXTRAS)
	@touch $@

.PHONY: set-up train test notebooks test-slow drills lint fix clean help

set-up: $(READY) ## make .venv with everything that the other targets need

train: $(READY) ## train CONFIG (default: the tiny MLA + MoE model) on the embedded text
	@$(BIN)/jaxfound train $(CONFIG) $(ARGS)

test: $(READY) ## every test but the slow ones and the notebooks
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  -m "not slow and not notebook" $(ARGS)

notebooks: $(READY) ## every notebook from an empty folder, as a reader runs it
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m notebook \
	  tests/end_to_end/test_notebooks.py $(ARGS)

test-slow: $(READY) ## the long proofs
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m slow $(ARGS)

DRILLS := tests/end_to_end/test_kill_drill.py tests/end_to_end/test_launch.py \
  tests/end_to_end/test_agents.py tests/resources/launch/test_agent.py \
  tests/resources/test_doctor_drills.py tests/resources/test_job_stop.py \
  tests/resources/test_watchdog.py $(foreach of,damage jobs remote retention tiers uploads,\
  tests/resources/test_checkpoint_$(of).py)

drills: $(READY) ## the drills of docs/fault-table.md, long ones too; what came of each is written
	@$(BIN)/python -m pytest -n 0 -p tests.drill_record --drills docs/benchmarks/drills.json \
	  $(or $(ARGS),$(DRILLS))

lint: $(READY) ## the gates before the tests, fastest first: format, lint, import floors, types
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pyright --pythonpath $(BIN)/python

fix: $(READY) ## format, and repair what ruff can repair
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

clean: ## remove caches and the virtual environment; runs/ stays
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile
