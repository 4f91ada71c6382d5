SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint types bench kernels gpu format

help: ## Show this list
	@grep -E '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Create .venv with everything that development needs

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e '.[dev,train,app]'
	touch $(STAMP)

demo: $(STAMP) ## Make a clip with the embedded model: outputs/demo.mp4
	$(BIN)/videospark generate --prompt "a large red circle moving right on a plain white background" --output outputs/demo.mp4

test: $(STAMP) ## Run the fast tests
	$(BIN)/pytest -q -m 'not slow'

test-slow: $(STAMP) ## Run the tests that take minutes
	$(BIN)/pytest -q -m slow

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Check types
	$(BIN)/mypy

bench: $(STAMP) ## Measure attention on this machine: outputs/bench
	$(BIN)/videospark bench attention --output outputs/bench

kernels: $(STAMP) ## Compile all Triton kernels for GPUs that need not be here
	$(BIN)/videospark bench kernels --output outputs/bench

gpu: $(STAMP) ## Check every kernel and measure every ratio on the GPU here: benchmarks/results
	$(BIN)/videospark bench gpu --output benchmarks/results

format: $(STAMP) ## Rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
