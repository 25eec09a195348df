# Everything runs in .venv, which is set up when it is missing or out of date (well under a second when it is not).
PYTHON := .venv/bin/python
SOURCES := kvserve tests scripts benchmarks install_and_run.py start_llm.py
PRESENT := $(wildcard $(SOURCES))

.PHONY: setup lint format test long matrix check e2e bench soak bench-clients

setup:
	@python3 install_and_run.py --setup-only --dev

lint: setup
	$(PYTHON) -m ruff check $(PRESENT)
	$(PYTHON) -m ruff format --check $(PRESENT)
	$(PYTHON) -m mypy
	MYPYPATH=scripts $(PYTHON) -m mypy $(wildcard scripts/*.py)

format: setup
	$(PYTHON) -m ruff check --fix $(PRESENT)
	$(PYTHON) -m ruff format $(PRESENT)

test: setup
	$(PYTHON) -m pytest

# What takes minutes: tool loops of forty turns, fifty large images, times with large images, and what shows once more
# what every run shows: the laws of the caches on families whose caches are like those of another one, starts that fail
# as processes of their own; then every law with ten times as many examples.
long: setup
	$(PYTHON) -m pytest -m long -n 0
	MORE_EXAMPLES=10 $(PYTHON) -m pytest --timeout 1200 $(shell grep -rl --include='test_*.py' num_examples tests)

# Every combination of families, bits, starts and ways: 40 minutes. `make test` takes a sample of them, `make long` more.
matrix: setup
	FULL_MATRIX=1 $(PYTHON) -m pytest tests/engine/test_kv_quantisation.py

check: lint test

e2e: setup
	$(PYTHON) -m pytest -m e2e -n 0

bench: setup
	$(PYTHON) -m benchmarks

# Half an hour of traffic on a server with a small cap on disk: SOAK_MINUTES for another time.
soak: setup
	$(PYTHON) -m benchmarks.soak --minutes $(or $(SOAK_MINUTES),30)

bench-clients: setup
	$(PYTHON) -m benchmarks --only open_loop --only real_loop --only paused_loop --only closed_loop --only own_turn
