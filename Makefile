# Each target makes .venv and installs what it needs when that is missing, and is quick when it is not.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Python for a GPU's tests and benchmarks: one whose torch sees it, which that of .venv may not.
GPU ?= $(BIN)/python

.PHONY: help demo test test-quick test-all test-gpu browser lint bench bench-gpu support families docs clean

help:
	@echo "make demo    train four small models, print the table, trace them, write demo/index.html (about 5 minutes)"
	@echo "make test    run the tests (about 8 minutes on two cores)"
	@echo "make test-quick  run the quick ones only (about 90 seconds)"
	@echo "make test-all  run the tests with every case of every product"
	@echo "make test-gpu  run the tests of GPU kernels; GPU=python3 takes another Python than that of .venv"
	@echo "make browser  install a browser for the tests of pages, where there is none"
	@echo "make lint    style, format and types"
	@echo "make bench   time the mechanisms, attention flow, graphs and pages against named rivals"
	@echo "make bench-gpu  time the GPU kernels against named rivals; writes results/gpu.md"
	@echo "make support  write docs/support.md from the tests of attach"
	@echo "make families  try attach on every model type of transformers, for docs/support.md (about 15 minutes; goes on where it was)"
	@echo "make docs    build the documentation into site/"
	@echo "make clean   remove .venv, runs/, demo/ and site/"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "overt needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing overt[train] into $(VENV) ..."
	$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing overt[dev] into $(VENV) ..."
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing overt[dev,bench] into $(VENV) ..."
	$(PIP) -e '.[dev,bench]'
	@touch $@

demo: $(VENV)/.installed-train
	$(BIN)/overt demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not exhaustive'

test-quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow and not exhaustive'

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-gpu: $(if $(findstring $(BIN),$(GPU)),$(VENV)/.installed-dev)
	@PYTHONPATH=src $(GPU) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null \
		|| { echo "$(GPU) has no torch that sees a GPU; name one that does: make test-gpu GPU=python3"; exit 1; }
	PYTHONPATH=src:tests $(GPU) -m pytest $(sort $(wildcard tests/test_fused_*.py tests/test_*cuda.py))

browser: $(VENV)/.installed-dev
	@$(BIN)/python tests/browser.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/mechanisms.py
	$(BIN)/python benchmarks/attach.py
	$(BIN)/python benchmarks/flow.py
	$(BIN)/python benchmarks/value_zeroing.py
	$(BIN)/python benchmarks/graphs.py
	$(BIN)/python benchmarks/page.py

bench-gpu: $(if $(findstring $(BIN),$(GPU)),$(VENV)/.installed-dev)
	PYTHONPATH=src $(GPU) benchmarks/gpu.py

support: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal --quiet --support docs/support.md \
		tests/test_battery.py tests/test_attach.py tests/test_attach_training.py tests/test_attach_cuda.py

families: $(VENV)/.installed-dev
	$(BIN)/python tests/sweep.py --table --page docs/support.md

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) runs demo site
