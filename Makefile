# `make demo` and `make test` set up everything they need in .venv, from a clone and Python alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test retest long check docs bench format map clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/evenload demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The tests that failed in the last run, once more.
retest: $(STAMP)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(PYTEST_ARGS)

# What takes half a minute and more each, and is tested in parts by `make test`.
long: $(STAMP)
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

map: $(STAMP)
	$(BIN)/python -m tests.unit.project.map
