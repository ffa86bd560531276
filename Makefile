# Everything a newcomer needs: `make demo`, `make test` and `make docs`. Each sets the environment up first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-slow lint docs bench-cpu bench-cuda clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench,track,export,docs,serve,milvus,parquet,hf,heic]'
	@touch $@

demo: $(READY)
	$(BIN)/proxymetric demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow"

test-slow: $(READY)
	$(BIN)/pytest -n 2 --dist loadgroup -m slow

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html; its search needs a server: python3 -m http.server -d site"

bench-cpu: $(READY)
	$(BIN)/python benchmarks/all.py --device cpu --minutes 60 --out runs/bench-cpu

# On a machine with its own torch for CUDA: make bench-cuda BENCH_PYTHON=python3
BENCH_PYTHON ?= $(BIN)/python
bench-cuda: $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),$(READY))
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(BENCH_PYTHON) benchmarks/all.py --device cuda --minutes 10 --out runs/bench-cuda

clean:
	rm -rf .venv runs site
