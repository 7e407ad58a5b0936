# Two commands: `make demo` and `make test`. Each makes its own .venv the first time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --progress-bar on -c tools/constraints.txt
WORKERS ?= 2

.PHONY: demo test lint matrix docs clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	@$(BIN)/ddtree-guard demo

test: lint
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check --output-format=concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

matrix: $(STAMP)
	$(BIN)/python tools/matrix.py

docs: $(STAMP)
	$(BIN)/ddtree-guard rules --markdown docs/rules

# SGLang comes without its dependencies: all of them together are over 10 GB, and most need a GPU.
$(STAMP): tools/constraints.txt tools/requirements-cpu.txt tools/requirements-sglang.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v[:2] <= (3, 13) else \
	  f"ddtree-guard needs Python 3.10 to 3.13, found {v[0]}.{v[1]}; run: make PYTHON=python3.11 ...")'
	@echo "Making $(VENV): about 6 GB, most of it torch; needed once."
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	$(PIP) -r tools/requirements-cpu.txt
	$(PIP) --no-deps -r tools/requirements-sglang.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .overlays build dist *.egg-info
