# Every command that a developer or CI needs. `make test` is all that CI runs at each change; `make chaos` is the rest of the tests.

PYTHON ?= python3
BIN := .venv/bin
CODE := src tests examples benchmarks

.PHONY: all format check lines test chaos demo bench-smoke bench-sched clean
all: test

# The stamp keeps pip from running again until what it installs changes.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

format: .venv/installed
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

check: .venv/installed
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo --no-cache

lines:
	@echo "lines in src/triptych: $$(find src/triptych -name '*.py' -exec cat {} + | wc -l)"

test: check lines
	$(BIN)/pytest

# Shows what it does while it runs: the faults with their times, and memory.
chaos: .venv/installed
	$(BIN)/pytest -s tests/chaos

demo: .venv/installed
	$(BIN)/python examples/demo.py

bench-smoke: .venv/installed
	$(BIN)/python benchmarks/smoke.py

bench-sched: .venv/installed
	$(BIN)/python benchmarks/scheduler.py

clean:
	rm -rf .venv build dist out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
