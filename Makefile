# Every target first sees to the environment it runs in, so each works alone on a fresh machine.

# Another PyTorch than the one that constraints.txt pins, such as 2.14, with its own Triton; or newest.
TORCH ?=
export TORCH
# The environment: a folder (made if missing, filled as constraints.txt and TORCH say), or "active".
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
# The Python that makes it; with VENV=active, the one whose environment is used.
PYTHON ?= python3
# Passed on to pytest, or to the benchmark or report.
ARGS ?=

ifeq ($(VENV),active)
python := "$(PYTHON)"
# The checkout is not installed into an environment that is not ours; Python finds it on its path.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
python := "$(VENV)/bin/python"
endif
environment := @bash tools/environment.sh "$(VENV)" "$(PYTHON)"

.PHONY: help test test-all test-newest test-tritons bench report docs lint wheel-test

help: ## this list
	@echo "make TARGET [ARGS=...] [VENV=.venv | VENV=active] [PYTHON=python3]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "VENV=active takes the environment that \$$PYTHON runs in, and adds to it only what is missing."

# Neighbours often compile the same kernel: a worker gets them together, and the next finds it in Triton's cache.
test: ## the quick tests in parallel; on the GPU where there is one, else with the Triton kernels interpreted
	$(environment) test
	$(python) -m pytest -n auto --dist worksteal $(ARGS)

test-all: ## all tests, the slow ones too
	$(environment) test
	$(python) -m pytest -n auto --dist worksteal -m "not wheel" $(ARGS)

test-newest: ## the same with the newest PyTorch and its Triton, as `pip install .` brings them (gigabytes)
	$(MAKE) test-all TORCH=newest

test-tritons: ## a slice of the tests with each other Triton that the library knows (fetched once: 750 MB)
	$(environment) test
	@bash tools/tritons.sh $(python) -n auto --dist worksteal $(ARGS)

bench: ## the attention benchmark; ARGS=--help lists its options
	$(environment) bench
	$(python) benchmarks/attention.py $(ARGS)

report: ## a page of every measurement, in a few minutes; ARGS="--preset 2025", ARGS=--help for the others
	$(environment) bench
	$(python) benchmarks/report.py $(ARGS)

# Not --quiet, which keeps warnings from --strict, too.
docs: ## the site of docs/, in site/; what does not resolve is an error (Python 3.11 or newer)
	$(environment) docs
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict $(ARGS)

lint: ## ruff (rules and format), then mypy
	$(environment) dev
	@status=0; for check in "ruff check ." "ruff format --check ." mypy; do \
	    echo "$$check"; $(python) -m $$check || status=1; \
	done; exit $$status

wheel-test: ## build the wheel and the sdist; install and import them, an editable install and a plain checkout
	$(environment) dev
	$(python) -m pytest -m wheel $(ARGS) tests/packaging
