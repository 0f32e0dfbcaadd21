PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test test-slow test-gpu lint types check clean

run: $(STAMP)  ## the default experiment, from nothing to a report
	$(BIN)/holdfast run

# Four processes with one thread each, on two cores: tests of federations mostly wait for one another. A module
# stays in one process, so that what its tests share is made once.
test: $(STAMP)  ## the whole test suite but the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadscope

test-slow: $(STAMP)  ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

test-gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP)  ## style, and that imports point one way only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

check: lint types test  ## everything CI checks

$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("holdfast needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./papers
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
