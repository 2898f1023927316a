# The project's commands.  Each sets up what it needs; `make` alone lists them.  Works with GNU make 3.81 (macOS).

# The first of these that is Python 3.11 or newer makes the virtual environment: make PYTHON=/path/to/python3 overrides.
PYTHONS = python3 python3.14 python3.13 python3.12 python3.11
NEW_ENOUGH = 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in $(PYTHONS); do $$p -c $(NEW_ENOUGH) 2>/dev/null && { echo $$p; break; }; done)

JOBS = 2
VENV = .venv
PY = $(VENV)/bin/python
STAMP = $(VENV)/.setup-done

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test check unit lint format clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv, fetch Pyodide and the demo model, find a browser (quick when nothing changed)

demo: $(STAMP) ## Ask SmolLM2 a question in headless Chrome; a table, and a report in out/
	$(PY) -m harness demo $(ARGS)

serve: $(STAMP) ## Serve the page on this machine: http://127.0.0.1:8000/
	$(PY) -m harness serve $(ARGS)

test: $(STAMP) ## Run every test in two processes (JOBS=2); choose some with ARGS="-k pool"
	$(PY) -m pytest -n $(JOBS) $(ARGS)

check: $(STAMP) ## Check style and types, and run the unit tests: before every commit
	@$(MAKE) -j 2 --no-print-directory lint unit

unit: $(STAMP)
	$(PY) -m pytest -q tests/unit

lint: $(STAMP) ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP) ## Format the Python files
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## Remove what was built; downloads in .stepwell/ and .venv/ stay
	rm -rf dist out build

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found: install it, or name one with make PYTHON=..." >&2; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(PY) -m pip install --quiet --editable . --group dev
	$(PY) -m harness setup
	touch $@
