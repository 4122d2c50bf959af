# Everything sets up what it needs: a virtual environment in .venv, with a CPU build of torch.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo docs test test-all check bench clean

demo: $(READY)
	$(BIN)/uniquery demo

docs: $(READY)
	$(BIN)/mkdocs build --strict
	@echo "Open site/index.html in a browser; for its search: python3 -m http.server -d site"

# One thread each, as threads of several processes on the same cores wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

test: $(READY)
	$(PYTEST) -m "not slow"

test-all: $(READY)
	$(PYTEST)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/step_time.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit('uniquery needs Python 3.11 or newer; try: make PYTHON=python3.12 ...' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache site
