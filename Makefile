# Everything a newcomer needs: `make demo`, `make test` and `make docs`. Each sets the environment up first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# One worker runs all tests of a file, so that it makes what they share once; the many short examples of src/ are last, so
# that no worker waits long for the other. A worker that has died is not replaced: pytest-xdist may then wait for ever.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=40
BENCH_PYTHON ?= $(BIN)/python
ELSEWHERE := not gpu and not server
# Both workers, and the processes that tests start, read modules that one of them has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: environment demo lint test test-quick test-slow test-all test-servers test-gpu docs bench-cpu bench-cuda clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,bench,track,export,docs,serve,milvus,pgvector,parquet,hf,heic]'
	-$(BIN)/python -m compileall -qq -j 0 .venv/lib  # by all cores; templates of some packages are no valid Python
	@touch $@

environment: $(READY)

demo: $(READY)
	$(BIN)/proxymetric demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint test-quick

test-quick: $(READY)
	$(PYTEST) -m "not slow and not release and $(ELSEWHERE)"

test-slow: $(READY)
	$(PYTEST) -m "slow and not release and $(ELSEWHERE)"

# Before a release, and before an issue is resolved: every case of the tests of which `make test-slow` draws some, the tests
# that take longest, and the programs of benchmarks/.
test-all: $(READY)
	PROXYMETRIC_TEST_SHARE=1 $(PYTEST) -m "$(ELSEWHERE)"

# Before a change to an engine that asks a server is merged.
test-servers: $(READY)
	$(PYTEST) -m server tests

# Before a change to a kernel, or to code that differs on a GPU, is merged; on a machine with its own torch for CUDA:
# make test-gpu BENCH_PYTHON=python3
test-gpu: $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),$(READY))
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(BENCH_PYTHON) -m pytest -m gpu tests
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(BENCH_PYTHON) -m pytest -m "not gpu" tests/ops

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html; its search needs a server: python3 -m http.server -d site"

bench-cpu: $(READY)
	$(BIN)/python benchmarks/all.py --device cpu --minutes 60 --out runs/bench-cpu

# On a machine with its own torch for CUDA: make bench-cuda BENCH_PYTHON=python3
bench-cuda: $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),$(READY))
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(BENCH_PYTHON) benchmarks/all.py --device cuda --minutes 10 --out runs/bench-cuda

clean:
	rm -rf .venv runs site
