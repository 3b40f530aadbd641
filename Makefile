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

.PHONY: help setup demo table1 fig4 fig5 fig6 fig8 table2 table6 ablations fig2 fig7 table3 table5 fidelity explore report test lint bench clean

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

fig4: $(READY)  ## Fig. 4: needle heat maps at 128 tokens
	$(BIN)/python run.py -m experiment=fig4 model=$(MODEL) limit=$(LIMIT)

fig5: $(READY)  ## Fig. 5: number of sources and neighbours
	$(BIN)/python run.py -m experiment=fig5 model=$(MODEL) task.data=$(DATA) limit=$(LIMIT)

fig6: $(READY)  ## Fig. 6: rounds of propagation for four scorers
	$(BIN)/python run.py -m experiment=fig6 model=$(MODEL) task.data=$(DATA) limit=$(LIMIT)

fig8: $(READY)  ## Fig. 8: what a source and its neighbours are compared by
	$(BIN)/python run.py -m experiment=fig8 model=$(MODEL) task.data=$(DATA) limit=$(LIMIT)

table2: $(READY)  ## Table 2: what neighbours receive, at 128 tokens
	$(BIN)/python run.py -m experiment=table2 model=$(MODEL) task.data=$(DATA) limit=$(LIMIT)

table6: $(READY)  ## Table 6: Fig. 5 by task
	$(BIN)/python run.py -m experiment=table6 model=$(MODEL) task.data=$(DATA) limit=$(LIMIT)

ablations: fig5 fig6 fig7 fig8 table2 table6  ## All of the paper's ablations

fig2: $(READY)  ## Fig. 2: how alike high-scored and kept keys are, before and after re-ranking
	$(BIN)/python run.py -m experiment=fig2 model=$(MODEL)

fig7: $(READY)  ## Fig. 7: principal components of keys, with what is kept after 0-3 rounds
	$(BIN)/python run.py -m experiment=fig7 model=$(MODEL)

table3: $(READY)  ## Table 3: latency, with prefill, selection and decoding apart
	$(BIN)/python run.py -m experiment=table3 model=$(MODEL)

table5: $(READY)  ## Table 5: size of the cache by prompt length
	$(BIN)/python run.py -m experiment=table5 model=$(MODEL)

fidelity: $(READY)  ## Divergence from the full cache against the budget (LIMIT: of each kind of prompt)
	$(BIN)/python run.py -m experiment=fidelity model=$(MODEL) limit=$(LIMIT)

explore: $(READY)  ## A page that shows which tokens SnapKV keeps without and with the graph
	$(BIN)/python -m graphkv.explore model=$(MODEL) +graphkv=off,on budget=256

report: $(READY)  ## One page of everything in results: results/report/index.html
	$(BIN)/python -m eval.report

test: $(READY)  ## Run the tests
	$(BIN)/python -m pytest

lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(READY)  ## Time batched against solo decoding
	$(BIN)/python scripts/bench_decode.py

clean:  ## Remove the virtual environment (results stay)
	rm -rf $(VENV)
