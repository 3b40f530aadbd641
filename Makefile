# `make help` lists the targets. All of them set up first where that has not been done.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Options of the experiments: make table1 MODEL=llama3 DATA=hub LIMIT=20
MODEL ?= smollm2
DATA ?= mini
LIMIT ?= null

.PHONY: help setup demo table1 test lint bench clean

help:  ## List the targets
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python scripts/fetch_model.py
	touch $@

setup: $(READY)  ## Make .venv with pinned versions and fetch the embedded model

demo: $(READY)  ## The main job on the embedded model: table and heat map of five cells
	$(BIN)/python run.py -m experiment=demo

table1: $(READY)  ## Table 1: LongBench at 512 tokens (MODEL=smollm2 DATA=mini LIMIT=null)
	$(BIN)/python run.py -m experiment=table1 model=$(MODEL) task.data=$(DATA) limit=$(LIMIT)

test: $(READY)  ## Run the tests
	$(BIN)/python -m pytest

lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(READY)  ## Time batched against solo decoding
	$(BIN)/python scripts/bench_decode.py

clean:  ## Remove the virtual environment (results stay)
	rm -rf $(VENV)
