# Two commands to begin with: `make demo` and `make test`. Each makes its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINES := .venv-engines

.PHONY: demo test slow sanitize fuzz check format charts docs bench bench-peers clean

demo: $(STAMP)
	$(BIN)/fedmoe compare configs/digits.toml --dir runs/demo

test: check
	$(BIN)/python -m pytest -n 2 -m "not slow"

# What takes minutes: the kernels under sanitizers, pages in a browser; and Ray and Flower, in an environment of their own
# (2 GB) and, where the system allows, with no network but loopback; of the silos' side all tests, of which some need Flower.
slow: $(STAMP) $(ENGINES)/.installed
	$(BIN)/python -m pytest -m slow --ignore=tests/distributed --ignore=tests/silos
	$(ENGINES)/bin/python tests/distributed/without_network.py $(ENGINES)/bin/python -m pytest tests/distributed tests/silos

# Of it the kernels alone: under the address and undefined-behaviour sanitizers, and with narrower vectors.
sanitize: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/native/test_sanitizers.py

# `make test` runs the same examples every time; this searches for others, FUZZ_RUNS times.
FUZZ_RUNS ?= 5
fuzz: $(STAMP)
	for run in $$(seq $(FUZZ_RUNS)); do \
	  FEDMOE_TEST_PROFILE=fuzz $(BIN)/python -m pytest -n 2 -q -m hypothesis tests || exit 1; \
	done

check: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

# The documentation site in build/site; warnings are errors.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The library that draws the charts of reports, from tools/charts/package-lock.json; needs node and npm.
charts:
	cd tools/charts && npm ci --silent && node build.mjs

bench: $(STAMP)
	$(BIN)/python benchmarks/against_loops.py
	$(BIN)/python benchmarks/population.py
	$(BIN)/python benchmarks/overheads.py
	$(BIN)/python benchmarks/report.py

# Flower, pfl and fedjax, each in an environment of its own under .bench/ (3 GB).
bench-peers: $(STAMP)
	$(BIN)/python benchmarks/against_peers.py
	$(BIN)/python benchmarks/report.py

# --no-build-isolation with a pinned setuptools: an isolated build would fetch its own, unpinned.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

$(ENGINES)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools torch
	$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev,ray,flower]'
	touch $@

clean:
	rm -rf $(VENV) $(ENGINES) .bench runs
