# Everything from a fresh machine that has Python 3.11 (or newer) and make:
#
#   make train      set up if needed, then train a small GPT on Python's own source, as a pipeline of 4 processes
#   make compare    set up if needed, then draw and price every schedule side by side
#   make test       set up if needed, then lint, types and the fast tests
#   make test-slow  the long tests
#   make check      lint, types, the fast and the long tests: what .ci/run calls
#   make test-all   both, and every case where they run a part of many: half an hour
#   make docs       the documentation as a site, in build/site; a broken link fails
#
# The first call makes .venv; later ones reuse it until pyproject.toml or constraints.txt change.
# To start over: rm -rf .venv

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# For two cores: many tests wait for processes and timeouts. The fast tests of a file stay together, because many look
# at what one group of processes saw, which each worker that took some of them would start again; files are short, and
# those with few tests come last. A slow test is long by itself: there, who is idle takes over tests of others.
FAST := -n 4 --dist loadfile
SLOW := -n 4 --dist worksteal

# Every process imports torch: where Python may not keep what it compiled, that takes four times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train compare test test-all test-slow check docs lint format setup clean

train: $(READY)
	$(BIN)/penstock train examples/train/gpt.toml --fresh

compare: $(READY)
	$(BIN)/penstock compare --draw

test: lint
	$(BIN)/pytest $(FAST)

test-all: lint
	$(BIN)/pytest $(SLOW) -m ""

# One run of both tiers: the workers load torch, and what the tests import, once.
check: lint
	$(BIN)/pytest $(SLOW) -m "not exhaustive"

test-slow: $(READY)
	$(BIN)/pytest $(SLOW) -m slow

docs: $(READY)
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -j 2 -c docs/site . build/site
	@echo "The site is in build/site: open build/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
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
