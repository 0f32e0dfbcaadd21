PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: run test test-slow test-gpu bench-check coverage docs dist lint options types check clean

run: $(STAMP)  ## the default experiment, from nothing to a report
	$(BIN)/holdfast run

# Four processes with one thread each, on two cores: tests of federations mostly wait for one another. A module
# stays in one process, so that what its tests share is made once. Bytecode is kept, whatever the environment
# says: every process of every test would compile holdfast anew.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadscope

test: $(STAMP)  ## the whole test suite but the slow tests
	$(PYTEST)

test-slow: $(STAMP)  ## the tests that take minutes
	$(PYTEST) -m slow

test-gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

bench-check: $(STAMP)  ## the speed guard: rounds, measuring and an exchange against what they took before
	cd benchmarks && ../$(BIN)/python check.py

coverage: $(STAMP)  ## which lines and branches the tests reach; fails below 90 %
	$(PYTEST) --cov --cov-report=term:skip-covered

docs: $(STAMP)  ## the documentation as a site, in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: $(STAMP)  ## wheels and sdists in build/dist, checked, and tried in an environment of their own
	rm -rf build/dist build/try
	$(BIN)/python -m build --outdir build/dist . >/dev/null
	$(BIN)/python -m build --outdir build/dist deploy >/dev/null
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/check-wheel-contents build/dist/*.whl
	$(PYTHON) -m venv build/try
	build/try/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build/dist/*.whl
	cd build/try && bin/holdfast run rounds=2 --quiet && bin/holdfast list algorithms --json >/dev/null \
		&& bin/holdfast federation --help >/dev/null && bin/holdfast paper 2>&1 | grep -q 'pip install ./papers'

lint: $(STAMP)  ## style, and that imports point one way only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

options: $(STAMP)  ## what editors know of the options of a run, after a new one in holdfast/experiments/spec.py
	PYTHONPATH=tests/support $(BIN)/python tests/support/option_types.py

types: $(STAMP)
	$(BIN)/mypy

check: lint types docs test  ## everything CI checks

$(STAMP): pyproject.toml deploy/pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("holdfast needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./deploy -e ./papers
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
