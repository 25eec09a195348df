# Everything runs in .venv, which is set up when it is missing or out of date (well under a second when it is not).
PYTHON := .venv/bin/python
SOURCES := kvserve tests scripts benchmarks install_and_run.py start_llm.py
PRESENT := $(wildcard $(SOURCES))

.PHONY: setup lint format test full full-of-commit mutants beside-load durations check e2e screenshots clients bench soak bench-clients

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

# Everything but `e2e`: the default run, every family and cell, and 25 times as many examples of each law. In parts that take
# about the same time, one after another, or one of them: `make full PART=3`.
PARTS := 5

full: $(if $(PART),full-$(PART),$(foreach part,$(shell seq $(PARTS)),full-$(part)))

full-%: setup
	FULL_RUN=1 $(PYTHON) -m pytest -m "not e2e" -n 2 --timeout 1200 --part $*/$(PARTS)

# Which part of `full` a commit is tested with beside the default run: all of them, over a few commits.
full-of-commit:
	$(MAKE) full-$$(( 0x$$(git rev-parse --short=7 HEAD) % $(PARTS) + 1 ))

# Each planted fault of tests/mutation/mutants against the tests; the table goes to tests/mutation/results.md. NEW=1: only
# those that it does not have.
mutants: setup
	$(PYTHON) -m tests.mutation $(if $(NEW),--new)

# The default tests twenty times beside a busy loop on each core: none may depend on how fast it is. LANES of them at once.
beside-load: setup
	$(PYTHON) -m tests.beside_load --runs $(or $(RUNS),20) --lanes $(or $(LANES),1)

# How long each file takes, by which the default run and the parts of `full` are ordered (tests/durations.json).
durations: setup
	$(PYTHON) -m pytest --keep-durations
	FULL_RUN=1 $(PYTHON) -m pytest -m "not e2e" -n 2 --timeout 1200 --keep-durations

check: lint test

screenshots: setup
	$(PYTHON) -m tests.e2e.dashboard_screenshots

e2e: setup
	$(PYTHON) -m pytest -m e2e -n 0

# What twelve clients reuse in two turns, on both ports; the table goes to benchmarks/results/clients.md.
clients: setup
	CLIENTS_TABLE=benchmarks/results/clients.md $(PYTHON) -m pytest -m e2e -n 0 -s tests/e2e/test_twelve_clients.py

bench: setup
	$(PYTHON) -m benchmarks

# Half an hour of traffic on a server with a small cap on disk: SOAK_MINUTES for another time.
soak: setup
	$(PYTHON) -m benchmarks.soak --minutes $(or $(SOAK_MINUTES),30)

bench-clients: setup
	$(PYTHON) -m benchmarks --only open_loop --only real_loop --only paused_loop --only closed_loop --only own_turn
