# `make demo` and `make test` set up everything they need in .venv, from a clone and Python alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# pip compiles every module of every package, one after the other; here, only torch's are compiled, the others when they are used.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE_TORCH := $(BIN)/python -c "import compileall, torch; compileall.compile_dir(torch.__path__[0], quiet=2, workers=2)"
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest
# Three files at a time, also on two cores: many tests wait for processes of their own (with two, `make test-all` took a tenth
# longer).
# In the order of tests/conftest.py: the longest files first.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# Tests start a thousand processes: none has to compile what it imports.
COMPILE := $(BIN)/python -m compileall -q -j 2 src tests benchmarks

.PHONY: demo test test-all failed retest long gpu check check-style check-types check-docs docs bench format map clean install-all

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	$(COMPILE_TORCH)
	touch $(STAMP)

# With Ray, for the system tests of its backend; where Ray can't be installed those tests are skipped.
install-all:
	test -e $(STAMP) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev,ray]' || { echo "make install-all: no Ray for this Python: its tests are skipped"; $(INSTALL) -e '.[dev]'; }
	test -e $(STAMP) || $(COMPILE_TORCH)
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/evenload demo

# Tests without commands, daemons, network namespaces, Slurm or Ray, and without those marked slow.
test: $(STAMP)
	$(COMPILE)
	$(PYTEST) $(PARALLEL) -m 'not long and not slow' tests/unit tests/ranks $(PYTEST_ARGS)

# All tests. Slurm, Ray, Fashion-MNIST and recorded workloads (EVENLOAD_TRACES) are used where they are installed.
test-all: $(STAMP)
	$(COMPILE)
	$(PYTEST) $(PARALLEL) $(PYTEST_ARGS)

# The tests that failed in the last run: their names, and once more.
failed: $(STAMP)
	$(PYTEST) --last-failed --last-failed-no-failures none --collect-only -q
retest: $(STAMP)
	$(PYTEST) --last-failed --last-failed-no-failures none $(PYTEST_ARGS)

# Tests of half a minute and more each, whose parts `make test-all` has.
long: $(STAMP)
	$(COMPILE)
	$(PYTEST) -m long $(PYTEST_ARGS)

# On a machine with a GPU: the tests marked gpu, and the fifteen experiments of benchmarks/gpu.
gpu: $(STAMP)
	$(PYTEST) -m gpu $(PYTEST_ARGS)
	$(BIN)/python -m benchmarks gpu

# Two at a time; what each prints stays together.
check: $(STAMP)
	@$(MAKE) -j 2 --output-sync=target --no-print-directory check-types check-style check-docs

check-style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
check-types:
	$(BIN)/mypy
check-docs:
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build

docs: $(STAMP)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Redraws the generated pages: docs/map.md from the first sentence of each source file, settings, commands, ports.
map: $(STAMP)
	$(BIN)/python -m tests.unit.project.map
	for page in settings commands ports; do $(BIN)/python -m tests.unit.project.$${page}_page > docs/$$page.md || exit 1; done

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
