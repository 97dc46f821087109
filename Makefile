# Everything from a fresh machine that has Python 3.11 (or newer) and make:
#
#   make train      set up if needed, then train a small GPT on Python's own source, as a pipeline of 4 processes
#   make compare    set up if needed, then draw and price every schedule side by side
#   make test       set up if needed, then lint, types and the fast tests
#   make test-slow  the long tests
#   make test-all   both, and every case where they run a part of many: longer than both together
#   make docs       the documentation as a site, in build/site; a broken link fails
#
# The first call makes .venv; later ones reuse it until pyproject.toml or constraints.txt change.
# To start over: rm -rf .venv

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# For two cores: many tests wait for processes and timeouts. One process collects the tests and forks the workers
# (tests/forked_workers.py). The tests of a file stay together, because many look at what one group of processes, one
# browser or one search has found, which each worker that took some of them would start again. Of the slow files those with
# the longest tests come first (tests/conftest.py). Of all tests some are longer than files: there, who is idle takes
# over tests of others.
FAST := --workers 3
SLOW := --workers 4
ALL := --workers 4 --share-files

# Every process imports torch: where Python may not keep what it compiled, that takes four times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train compare test test-all test-fast test-slow accelerator collect docs lint format setup clean

train: $(READY)
	$(BIN)/penstock train examples/train/gpt.toml --fresh

compare: $(READY)
	$(BIN)/penstock compare --draw

test: lint test-fast

test-fast: $(READY) accelerator
	$(BIN)/pytest $(FAST)

test-all: lint accelerator
	$(BIN)/pytest $(ALL) -m ""

test-slow: $(READY) accelerator
	$(BIN)/pytest $(SLOW) -m "slow and not exhaustive"

# Compiles the pretended accelerator of the tests, for a minute, once; without a compiler its tests are skipped by name.
accelerator: $(READY)
	$(BIN)/python tests/accelerator/build.py --if-possible

# Compiles the tests, which takes 23 seconds in a fresh copy, while the linters have the other core.
collect: $(READY)
	$(BIN)/pytest --collect-only --quiet --quiet > /dev/null

docs: $(READY)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -j 2 -c docs/site . build/site
	@echo "The site is in build/site: open build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/words.py
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(READY)

# The mark is written last, so a set-up that was interrupted is done again. PYTHON=... chooses the Python.
$(READY): pyproject.toml constraints.txt
	@found=; \
	for python in $(or $(PYTHON),python3.11 python3 python); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "Penstock needs Python 3.11 or newer; $(or $(PYTHON),python3) here is: $$($(or $(PYTHON),python3) --version 2>&1)." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$("$$found" --version); the first time takes a minute or more."; \
	"$$found" -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,docs]'
	@touch $@

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name $(VENV) -prune -o -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +
