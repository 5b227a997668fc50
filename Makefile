# Everything that a fresh clone needs is python3 (3.10 to 3.13): the targets make a virtual environment and install into it what is missing.
PYTHON ?= python3
VENV ?= .venv
# Pinned by name: an unpinned torch may bring a CUDA build of several GB where the CPU's suffices.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
export OMP_NUM_THREADS ?= 1
# Tests that run at once. More than two would be more real jobs of eight ranks at once than most machines hold.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test lint soak bench wheel clean

help:
	@echo 'make demo    make a virtual environment, install, run the demo (args: DEMO="--params 46M")'
	@echo 'make test    the same, and run the tests                      (args: TESTS="tests/unit -x", WORKERS=0)'
	@echo 'make lint    ruff, mypy --strict, import-linter'
	@echo 'make soak    the tests with the long ones'
	@echo 'make bench   the benchmarks with their bars                   (args: BENCH="--quick")'
	@echo 'make wheel   dist/*.whl'
	@echo 'make clean   remove what make made (the virtual environment too)'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else f"everystep needs Python 3.10 to 3.13, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV) || { echo 'no virtual environment could be made: on Debian and Ubuntu, apt-get install python3-venv' >&2; rm -rf $(VENV); exit 1; }

# A stamp for each set of packages: a second run installs nothing. torch goes in the same call, so that one resolution sees its pin.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo 'installing everystep and $(TORCH) (once)'
	@$(PIP) '$(TORCH)' -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo 'installing everystep, $(TORCH) and what the tests need (once)'
	@$(PIP) '$(TORCH)' -e '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-lint: pyproject.toml | $(VENV)/.installed-test
	@echo 'installing the linters (once)'
	@$(PIP) '$(TORCH)' -e '.[test,lint]'
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/everystep demo $(DEMO)

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(TESTS)

soak: $(VENV)/.installed-test
	@HYPOTHESIS_PROFILE=nightly EVERYSTEP_SOAK_ROUNDS=$${EVERYSTEP_SOAK_ROUNDS:-200} $(BIN)/python -m pytest --soak --timeout 3600 $(TESTS)

lint: $(VENV)/.installed-lint
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(VENV)/.installed
	@worst=0; for program in bench/[a-z]*.py; do echo "== $$program"; $(BIN)/python "$$program" $(BENCH) || worst=$$?; done; exit $$worst

wheel: $(VENV)/.installed-test
	@$(PIP) build
	@$(BIN)/python -m build --wheel --outdir dist .

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache everystep-demo
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
