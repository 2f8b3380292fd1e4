# What a person runs. `make demo` and `make test` work in a clean clone: each makes .venv first if it is not there.

PYTHON ?= python3
BENCH ?= kernels
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet
TORCH = $(shell grep '^torch==' constraints.txt)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test check bench fmt
.DEFAULT_GOAL := help

help:
	@echo "make install   make $(VENV) and install pipecomp and its tools into it (PYTHON=$(PYTHON))"
	@echo "make demo      train a small model over slow links, three ways; under four minutes"
	@echo "make test      run the quick tests that need no download"
	@echo "make check     lint, types and import contracts"
	@echo "make fmt       fix what can be fixed by itself"
	@echo "make bench     run one benchmark (BENCH=$(BENCH))"

install: $(STAMP)

# torch goes first and by itself: asked for as one dependency among many, pip may take another build of several GB. A torch
# that is already in $(VENV) and satisfies constraints.txt (a CPU or CUDA build of your choice) is kept.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "installing pipecomp and its tools"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	@scripts/test

check: $(STAMP)
	@scripts/check

fmt: $(STAMP)
	@scripts/fmt

bench: $(STAMP)
	@$(BIN)/pipecomp bench $(BENCH)
