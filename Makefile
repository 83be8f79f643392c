# Everything here works on a Linux machine with Python 3.11 to 3.14, git, make and a C++ compiler.

SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN := .venv/bin
# The Python of .venv, or else the one that .venv is made with. deploy/install.py names the versions.
PYTHON ?= $(shell for p in $(BIN)/python python3.11 python3.12 python3.13 python3.14 python3 \
	$$(uv python find '>=3.11,<3.15' 2>/dev/null); do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& echo $$p && break; done)

# Named after what they depend on: a changed version installs again, a fresh checkout does not.
# So does another processor, for which other CPU kernels are compiled.
KEY := $(shell (cat pyproject.toml constraints.txt deploy/locks/*.txt deploy/install.py Makefile setup.py services/tandem/common/*.c \
	services/tandem/engine/tiers/slots/*.c kernels/*.py kernels/tandem_kernels/native/*.cpp kernels/tandem_kernels/native/*.h; \
	grep -m1 -E '^(flags|Features)' /proc/cpuinfo) | cksum | cut -d' ' -f1)
RUNTIME := .venv/installed-runtime-$(KEY)
DEV := .venv/installed-dev-$(KEY)

# Programs with a virtual environment of their own: name of the package, of the program.
TOOLS := .venv/tools/bin
TOOL = (test -x $(TOOLS)/$(2) || ($(BIN)/python -m venv .venv/tools \
	&& $(TOOLS)/python -m pip --disable-pip-version-check install --quiet $(1)))
PROTOC = $(BIN)/python -m grpc_tools.protoc -Itandem/net/rpc=proto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) proto/tandem/v1/*.proto

.PHONY: help
help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: up
up: $(RUNTIME) ## start the whole cluster here (options: make up ARGS="--decode 2"); Ctrl-C stops it
	@exec $(BIN)/tandem up --die-with-parent $$PPID $(ARGS)

.PHONY: test
test: $(DEV) ## run the tests (a part of them: make test ARGS=tests/unit)
ifdef ARGS
	@$(BIN)/python -m pytest $(ARGS)
else
	@$(BIN)/python tests/lanes.py
endif

.PHONY: check
check: lint test ## the one check before a commit: lint, types, contracts, generated code, tests

.PHONY: lint
lint: format-check ruff mypy imports proto-check ## everything that checks without running

.PHONY: format
format: $(DEV) ## format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

.PHONY: format-check
format-check: $(DEV)
	@$(BIN)/ruff format --check .

.PHONY: ruff
ruff: $(DEV)
	@$(BIN)/ruff check .

.PHONY: mypy
mypy: $(DEV)
	@$(BIN)/mypy

.PHONY: imports
imports: $(DEV)
	@$(BIN)/lint-imports

.PHONY: proto
proto: $(DEV) ## generate services/tandem/net/rpc/tandem from proto/
	@$(call PROTOC,services)

.PHONY: options
options: $(DEV) ## write the options' page and the chart's options from the settings
	@$(BIN)/python docs/reference/generate.py

.PHONY: reference
reference: $(DEV) ## write the reference pages of the APIs and the tables of figures
	@$(BIN)/python -m docs.reference.apis && $(BIN)/python -m docs.reference.figures

.PHONY: site
site: $(DEV) ## build the documentation site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo 'open build/site/index.html'

.PHONY: release
release: $(DEV) ## build a release in dist/, without publishing it (ARGS=--tag makes the tag, too)
	@$(BIN)/python deploy/release.py $(ARGS)

.PHONY: structure
structure: $(DEV) ## print packages, layers, arrows and cycles, found in the imports
	@$(BIN)/python docs/reference/structure.py

.PHONY: lock
lock: $(DEV) ## write the hashes of what constraints.txt names into deploy/locks/
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python deploy/locks/generate.py

.PHONY: sbom
sbom: $(DEV) ## write sbom.json: what is installed here, as CycloneDX
	@$(call TOOL,cyclonedx-bom,cyclonedx-py) && $(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml \
		--mc-type application --output-reproducible --output-file sbom.json $(BIN)/python

.PHONY: audit
audit: $(DEV) ## look up known vulnerabilities of the locked packages (asks a service on the network)
	@$(call TOOL,pip-audit,pip-audit) && $(TOOLS)/pip-audit --no-deps --disable-pip -r deploy/locks/dev.txt

.PHONY: proto-check
proto-check: $(DEV)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call PROTOC,$$fresh) \
	&& for file in $$(cd "$$fresh" && find . -type f); do \
		cmp "$$fresh/$$file" "services/$$file" || { echo 'generated code is old: run make proto'; exit 1; }; \
	done && echo 'generated code is up to date'

.PHONY: install
install: $(DEV) ## make .venv with all that development needs

.PHONY: clean
clean: ## remove .venv and caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache *.egg-info

define INSTALL
@test -n "$(PYTHON)" || { echo 'Tandem needs Python 3.11 to 3.14, and none is found; name one: make PYTHON=PATH'; exit 1; }
@$(PYTHON) deploy/install.py $(1)
endef

$(RUNTIME):
	$(call INSTALL,runtime)
	@touch $@

$(DEV):
	$(call INSTALL,dev)
	@touch $@ $(RUNTIME)
