# make demo       from a fresh clone to a report: creates .venv, installs, runs the main job on the bundled images
# make test       installs what tests need and runs all that are not marked slow: under 5 minutes on two cores
# make test-all   runs the slow ones as well
# make test-cpus  runs make test under six settings of a CPU's arithmetic, about half an hour, and prints a table
# make lint       ruff and pyright
# make install-locked  what tests need, into .venv, with every file but torch's checked against requirements.lock
# make lock       requirements.lock anew from constraints.txt: versions and the hashes that the index states
# make sbom       dist/sbom.cdx.json: a bill of materials (CycloneDX) of what splitveil needs to run
# make audit      known vulnerabilities in what is locked; asks a public service
# make bench      what steps, surrogates and refreshes cost, in about 3 minutes; fails if a ratio got more than 20 % worse
# make tables     every defence with and without CEM on the bundled images: hours on two cores, resumable

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The pip of PYTHON installs into .venv, so that venv needs no ensurepip (Debian packs that separately). It installs a pip there too:
# without one, `pip install` in the activated .venv would install somewhere else.
INSTALL_ALONE := $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check
INSTALL := $(INSTALL_ALONE) --constraint constraints.txt

# Two processes; the tests of a file stay in one of them, because they share what the file trains.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test test-all test-cpus lint bench tables install-locked lock sbom audit clean

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

# torch comes second, by its version alone: its wheel differs by machine. What builds splitveil is locked as well, so nothing is fetched
# for the last step.
install-locked: | $(VENV)/bin/python
	@echo 'installing into $(VENV); the first time this can take some minutes'
	@$(INSTALL_ALONE) --require-hashes --only-binary :all: --no-deps --force-reinstall --requirement requirements.lock
	@$(INSTALL) torch
	@$(INSTALL_ALONE) --no-deps --no-build-isolation --editable .
	@touch $(VENV)/.installed $(VENV)/.installed-dev

lock:
	$(PYTHON) .ci/lock.py < constraints.txt > requirements.lock.new
	mv requirements.lock.new requirements.lock

sbom: $(VENV)/.installed-dev
	@mkdir -p dist
	$(BIN)/python .ci/sbom.py > dist/sbom.cdx.json

# In an environment of its own, so that what it needs is not among what is audited.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	grep '^torch==' constraints.txt > build/audit/torch.txt
	build/audit/bin/pip-audit --strict --require-hashes --disable-pip --requirement requirements.lock
	build/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement build/audit/torch.txt

clean:
	rm -rf $(VENV) build dist *.egg-info
