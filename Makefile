# Each target makes .venv and installs what it needs when that is missing, and is quick when it is not.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

# Modules are compiled when they are first imported, not all of them by pip, which takes over a minute.
unexport PYTHONDONTWRITEBYTECODE

# Python for a GPU's tests and benchmarks: one whose torch sees it, which that of .venv may not.
GPU ?= $(BIN)/python

.PHONY: help demo test test-quick test-all test-gpu test-peers test-scale browser lint wheel bench bench-gpu support families docs clean

help:
	@echo "make demo        train four small models, trace them, write demo/index.html (about 5 minutes)"
	@echo "make test        run the tests (about 8 minutes on two cores, installation included)"
	@echo "make test-quick  run the quick tests (about 80 seconds)"
	@echo "make test-all    run the tests with every combination of their parameters"
	@echo "make test-gpu    run the tests of the GPU kernels; GPU=python3 chooses another Python than .venv's"
	@echo "make test-peers  install x-transformers, fair-esm and laplace-torch, and compare with them"
	@echo "make test-scale  install pyarrow, datasets, Ray and DuckDB, and trace corpora with them (about 4 minutes)"
	@echo "make browser     install a browser for the tests of pages, if there is none"
	@echo "make lint        check style, format and types"
	@echo "make wheel       build a wheel, install it into an empty environment and run it there"
	@echo "make bench       time the mechanisms, attention flow, graphs and pages against baselines"
	@echo "make bench-gpu   time GPU kernels, vision networks and long traces; writes results/gpu.md, vision.md, long-traces.md"
	@echo "make support     write docs/support.md from the tests of attach"
	@echo "make families    try attach on every model type of transformers, for docs/support.md (8 to 40 minutes; resumes)"
	@echo "make docs        build the documentation into site/"
	@echo "make clean       remove .venv, runs/, demo/, build/ and site/"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "overt needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing overt[train] into $(VENV) ..."
	$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing overt[test] into $(VENV) ..."
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing overt[dev] into $(VENV) ..."
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing overt[test,bench] into $(VENV) ..."
	$(PIP) -e '.[test,bench]'
	@touch $@

$(VENV)/.installed-peers: $(VENV)/.installed-test
	@echo "installing x-transformers, fair-esm and laplace-torch into $(VENV) ..."
	$(PIP) x-transformers fair-esm
	$(PIP) --no-deps $(LAPLACE)
	@touch $@

# laplace-torch and what it imports; by its requirements, it would also install torchvision, which it does not.
LAPLACE := laplace-torch==0.3 asdfghjkl backpack-for-pytorch curvlinops-for-pytorch einconv einops \
	linear_operator opt_einsum unfoldNd

$(VENV)/.installed-scale: $(VENV)/.installed-test
	@echo "installing overt[scale] and duckdb into $(VENV) ..."
	$(PIP) -e '.[scale]' duckdb
	@touch $@

demo: $(VENV)/.installed-train
	$(BIN)/overt demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not exhaustive'

test-quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow and not exhaustive'

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-gpu: $(if $(findstring $(BIN),$(GPU)),$(VENV)/.installed-test)
	@PYTHONPATH=src $(GPU) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null \
		|| { echo "$(GPU) has no torch that sees a GPU; name one that does: make test-gpu GPU=python3"; exit 1; }
	PYTHONPATH=src:tests $(GPU) -m pytest $(sort $(wildcard tests/test_fused_*.py tests/test_*cuda.py))

test-peers: $(VENV)/.installed-peers
	$(BIN)/python -m pytest tests/test_peers.py tests/test_laplace.py

test-scale: $(VENV)/.installed-scale
	$(BIN)/python -m pytest $(sort $(wildcard tests/test_scale_*.py))

browser: $(VENV)/.installed-test
	@$(BIN)/python tests/browser.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Outside the checkout, where nothing but the wheel can be imported.
wheel:
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; rm -rf build; \
	$(PYTHON) -m venv "$$folder/venv"; pip="$$folder/venv/bin/python -m pip --quiet --disable-pip-version-check"; \
	$$pip wheel --no-deps --wheel-dir "$$folder" .; \
	$$pip install --no-compile -c constraints.txt "$$(echo "$$folder"/overt-*.whl)[train]"; \
	cd "$$folder"; venv/bin/overt --help; venv/bin/overt demo --steps 20

bench: $(VENV)/.installed-bench $(VENV)/.installed-scale
	$(BIN)/python benchmarks/mechanisms.py
	$(BIN)/python benchmarks/attach.py
	$(BIN)/python benchmarks/generate.py --sentences 4 --tokens 10 --repeats 3
	$(BIN)/python benchmarks/translation.py --small --updates 5 --sentences 8 --new-tokens 10
	$(BIN)/python benchmarks/flow.py
	$(BIN)/python benchmarks/value_zeroing.py
	$(BIN)/python benchmarks/judging.py
	$(BIN)/python benchmarks/graphs.py
	$(BIN)/python benchmarks/vision.py --small --batch 8 --side 64 --ways eager
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/page.py --long
	$(BIN)/python benchmarks/long_trace.py --shape smollm2 --tokens 2000 --ways trace --memory 268435456
	$(BIN)/python benchmarks/corpus.py
	$(BIN)/python benchmarks/corpus.py --workers --sentences 512

bench-gpu: $(if $(findstring $(BIN),$(GPU)),$(VENV)/.installed-test)
	PYTHONPATH=src $(GPU) benchmarks/gpu.py
	PYTHONPATH=src $(GPU) benchmarks/small_updates.py
	PYTHONPATH=src $(GPU) benchmarks/vision.py --profile 14 --changes --report results/vision.md
	PYTHONPATH=src $(GPU) benchmarks/long_trace.py --shape llama-8b --tokens 4096 8192 32768 131072 \
		--ways trace eager --gradients 32768 --report results/long-traces.md

support: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal --quiet --support docs/support.md \
		tests/test_battery.py tests/test_attach.py tests/test_attach_training.py tests/test_attach_cuda.py

families: $(VENV)/.installed-test
	$(BIN)/python tests/sweep.py --table --page docs/support.md

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) runs demo build site
