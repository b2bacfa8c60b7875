# The environment is .venv, made from requirements.lock; every target below makes it when needed.
# It has to be made with Python 3.11 or newer: make PYTHON=python3.12 test
# The newest JAX has a lock of its own: make PYTHON=python3.13 VENV=.venv-newest LOCK=requirements-newest.lock test

PYTHON ?= python3
UV ?= uv
COMPILE = $(UV) pip compile --no-config --no-emit-index-url --generate-hashes --extra dev \
	--custom-compile-command 'make lock' --quiet

NEWEST ?= python3.13
VENV ?= .venv
LOCK ?= requirements.lock
AT_NEWEST = PYTHON=$(NEWEST) VENV=.venv-newest LOCK=requirements-newest.lock
BIN := $(VENV)/bin
# a file to each worker at a time: tests of a file share what they compile. Files of jobs come first
WORKERS = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo unit test nightly core compat fuzz lint format bench bench-smoke peers chaos reliability notebooks docs architecture lock dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make the environment in .venv

demo: $(STAMP) ## train with two trainers and two parameter servers as processes; draws loss.png
	$(BIN)/dtrans example digits --engine processes --trainers 2 --pservers 2 --plot loss.png

unit: $(STAMP) ## run the tests of rules, passes and protocol machines: 50 seconds on two cores
	$(BIN)/python -m pytest -m 'unit and not soak' $(WORKERS)

test: $(STAMP) ## run all units and plans, and today's sample of jobs and processes: ten to fourteen minutes
	$(BIN)/python -m pytest $(WORKERS)

nightly: $(STAMP) ## run all that today's sample leaves out: three hours; an hour with SAMPLE_NIGHTS=4
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m soak $(WORKERS)

core: $(STAMP) ## run the tests of the passes alone: a few minutes
	$(BIN)/python -m pytest $(WORKERS) tests/test_jax_versions.py tests/test_jax_imports.py \
		tests/test_fingerprints.py tests/ir tests/step tests/rows tests/engine tests/run/test_jobs.py \
		tests/verification/test_user_shard_map.py

compat: ## run the suite on the newest JAX, core tests on those between (needs Python 3.13; make NEWEST=... says where)
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(MAKE) test $(AT_NEWEST)
	JAX_REMAT3=1 JAX_CUSTOM_VJP3=1 JAX_CUSTOM_JVP3=1 $(MAKE) core $(AT_NEWEST)
	.venv-newest/bin/python -m pytest -m soak tests/test_jax_primitives.py
	$(MAKE) core PYTHON=$(NEWEST) VENV=.venv-oldest
	$(MAKE) venv PYTHON=$(NEWEST) VENV=.venv-between LOCK=requirements-newest.lock
	.venv-between/bin/python -m pip install --quiet 'jax==0.11.*' 'jaxlib==0.11.*'
	$(MAKE) core PYTHON=$(NEWEST) VENV=.venv-between LOCK=requirements-newest.lock

fuzz: $(STAMP) ## slice 2,000 random updates, verify plans of 10,000 random steps (takes hours)
	DTRANS_EXAMPLES=2000 $(BIN)/python -m pytest tests/slicing/test_any_update.py
	DTRANS_EXAMPLES=10000 $(BIN)/python -m pytest -rP -n auto --dist load tests/verification/test_random_steps.py

lint: $(STAMP) ## check style, format, types, prose and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.check_prose
	$(BIN)/codespell

format: $(STAMP) ## put the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## run the benchmarks
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only --benchmark-sort=fullname \
		--benchmark-columns=min,median,iqr,ops,rounds,iterations

bench-smoke: $(STAMP) ## run every benchmark once, of its smallest size
	$(BIN)/python -m pytest benchmarks --benchmark-disable --durations=5

peers: $(STAMP) ## train the same job in dtrans, PyTorch and Ray, each in an environment of its own, and print ratios
	PYTHONPATH=benchmarks:. $(BIN)/python -m peers.driver $(PEERS)

chaos: $(STAMP) ## kill and stop processes of jobs at random moments, and compare their results (takes over an hour)
	$(BIN)/python benchmarks/chaos.py --rounds 100
	$(BIN)/python benchmarks/chaos.py --rounds 100 --replicas 1

reliability: $(STAMP) ## kill processes of jobs, and write the cost of each loss into docs/reliability.md
	$(BIN)/python benchmarks/kill_matrix.py docs/reliability.md

notebooks: $(STAMP) ## run the notebooks from top to bottom
	$(BIN)/python -m pytest notebooks --nbmake --nbmake-timeout=280

docs: $(STAMP) ## write docs/optimizers.md, steps.md, verified.md, libraries.md and combinations.md anew, from the plans of all of them
	$(BIN)/python tests/support/optimizer_zoo.py docs/optimizers.md
	$(BIN)/python tests/support/step_table.py
	$(BIN)/python tests/support/verified_table.py
	$(BIN)/python tests/support/library_table.py
	$(BIN)/python tests/support/mesh_table.py

architecture: $(STAMP) ## write docs/architecture.md and its drawing anew, from the imports and a profiler hook
	$(BIN)/python docs/architecture.py docs

lock: ## write both locks anew from pyproject.toml (needs uv); pins that still hold are kept
	$(COMPILE) --universal --python-version 3.11 --constraint .ci/oldest.txt --output-file requirements.lock pyproject.toml
	$(COMPILE) --universal --python-version 3.13 --output-file requirements-newest.lock pyproject.toml

dist: $(STAMP) ## build the sdist and the wheel in dist/, and try each in a clean environment
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	.ci/try-dist $(PYTHON)

clean: ## remove caches and outputs; environments stay
	rm -rf build dist runs .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache loss.png *.egg-info
	find . -path './.venv*' -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +

$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "dtrans needs Python 3.11 or newer, but $(PYTHON) is" \
			"$$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --require-hashes --only-binary :all: -r $(LOCK)
	$(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@
