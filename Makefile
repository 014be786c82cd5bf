# Paceline: every task a contributor or a newcomer needs. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest --durations=10
FILE ?= manifests/examples/smollm2.yaml
PORT ?= 8080
STAMP := $(VENV)/.paceline-installed

.PHONY: help setup up test test-all check kube node e2e gen bench-engine bench-gpu bench-kv bench-mechanisms bench-skeleton clean

help: ## Show this list
	@grep -hE '^[a-z][a-z0-9-]*:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(STAMP) ## Install Python packages into .venv (about 3 GB with torch; minutes the first time)

$(STAMP): pyproject.toml constraints.txt hack/setup.sh $(wildcard engine/paceline_engine/native/src/*)
	@VENV=$(VENV) hack/setup.sh
	@touch $(STAMP)

up: $(STAMP) ## Run the objects of FILE as local processes: make up [FILE=...] [PORT=8080]
	@exec $(VENV)/bin/paceline up $(FILE) --port $(PORT)

test: $(STAMP) ## Everything CI requires without a GPU: unit, engine, processes, real control plane
	@hack/test.sh $(PY)

test-all: test node ## test, and the real container runtime

check: $(STAMP) ## ruff, types, import contracts, house rules, generated files
	$(VENV)/bin/ruff check --output-format concise .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/basedpyright --level error
	$(VENV)/bin/lint-imports --cache-dir .import_linter_cache
	$(PY) hack/generate.py --check
	$(PY) -m pytest -q tests/test_layout.py tests/test_tidy.py

kube: $(STAMP) ## Tests on a real API server, controller manager and scheduler (needs root and Go)
	$(PYTEST) -m kube tests/kube

node: $(STAMP) ## A rendered engine Pod under a real container runtime (needs root; installs runc from Debian)
	@tests/kube/install_runc.sh
	$(PYTEST) -m node tests/kube

e2e: $(STAMP) ## The whole product as local processes
	$(PYTEST) -m e2e tests/e2e

gen: $(STAMP) ## Write the generated files: CRDs, reference pages
	$(PY) hack/generate.py

bench-engine: $(STAMP) ## Engine speed beside llama.cpp, transformers and the machine's roof
	$(PY) benchmarks/engine.py

bench-kv: $(STAMP) ## Tiers of the KV store beside memcpy, the raw device, a raw socket, plain boto3 and LMCache; an engine with one and without, 10 minutes -> benchmarks/results/kv*.json
	$(PY) benchmarks/kv.py
	$(PY) benchmarks/kv_engine.py

bench-mechanisms: $(STAMP) ## Each mechanism of the engine on and off, as ratios -> benchmarks/results/mechanisms.json
	$(PY) benchmarks/mechanisms.py

bench-gpu: $(STAMP) ## All that only a GPU can show, at most 8 minutes on an H200 -> benchmarks/results/gpu.json
	$(PY) benchmarks/gpu.py

bench-skeleton: $(STAMP) ## Start-up times and engine speed on this machine -> benchmarks/results/skeleton.json
	$(PY) benchmarks/skeleton.py

clean: ## Remove build outputs and caches, keep .venv
	rm -rf .build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
