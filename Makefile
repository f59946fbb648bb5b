# Targets for people; `make ci` is what has to pass before a change goes in.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install test lint types verify report ci

install:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e '.[dev]' -e './ladder[test]'

test:
	$(BIN)/python -m pytest -n auto

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/pyright
	$(BIN)/mypy

verify:
	$(BIN)/flashtile verify

report:
	$(BIN)/flashtile report --quick

ci:
	.ci/run
