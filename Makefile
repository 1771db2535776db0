# make demo       from a fresh clone to a report: creates .venv, installs, runs the main job on the bundled images
# make test       installs what tests need and runs all that are not marked slow: under 5 minutes on two cores
# make test-all   runs the slow ones as well
# make test-cpus  runs make test under six settings of a CPU's arithmetic, about half an hour, and prints a table
# make lint       ruff and pyright
# make bench      what steps, surrogates and refreshes cost, in about 3 minutes; fails if a ratio got more than 20 % worse
# make tables     every defence with and without CEM on the bundled images: hours on two cores, resumable

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The pip of PYTHON installs into .venv, so that venv needs no ensurepip (Debian packs that separately). It installs a pip there too:
# without one, `pip install` in the activated .venv would install somewhere else.
INSTALL := $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check --constraint constraints.txt

# Two processes; the tests of a file stay in one of them, because they share what the file trains.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test test-all test-cpus lint bench tables clean

demo: $(VENV)/.installed
	$(BIN)/splitveil demo

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.installed-dev
	$(PYTEST)

test-cpus: $(VENV)/.installed-dev
	benchmarks/cpu_matrix.sh

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(VENV)/.installed-dev
	$(BIN)/splitveil bench --device cpu --batches 128 --against benchmarks/measured/bench_cpu.json

tables: $(VENV)/.installed
	$(BIN)/python -m benchmarks.tables

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "splitveil needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'installing into $(VENV); the first time this can take some minutes'
	@$(INSTALL) pip --editable '.[report]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'installing into $(VENV); the first time this can take some minutes'
	@$(INSTALL) pip --editable '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info
