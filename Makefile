# `make demo` and `make test` need Python 3.10 or newer and nothing else: they make .venv once and reuse it.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(if $(shell command -v uv 2>/dev/null),uv pip install -q --python $(BIN)/python,$(BIN)/pip install -q --disable-pip-version-check)
THREADS := OMP_NUM_THREADS=$(shell getconf _NPROCESSORS_ONLN)

.PHONY: demo test lint clean

.venv/installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("pptp needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e '.[test]'
	touch $@

demo: .venv/installed
	$(THREADS) HF_HUB_OFFLINE=1 $(BIN)/pptp demo

test: .venv/installed
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n auto --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .

clean:
	rm -rf .venv build *.egg-info
