# The two commands of the README are `make run` and `make test`. Both create .venv first.
PYTHON ?= python3
BIN := .venv/bin
RUN_STAMP := .venv/.installed-run
TEST_STAMP := .venv/.installed-test

.PHONY: run test test-full install install-test install-gpu transfer-library protos golden llama lint clean

run: install
	@$(BIN)/headrace demo

test: install-test
	@$(BIN)/python -m pytest

test-full: install-test
	@$(BIN)/python -m pytest --full --summary bench/results/test-full.json

install: $(RUN_STAMP) transfer-library

install-test: $(TEST_STAMP) transfer-library

$(RUN_STAMP): requirements.txt requirements-alone.txt pyproject.toml
	@echo "Creating .venv (this downloads torch once) ..."
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
		|| { echo "Headrace needs Python 3.11 or 3.12; say which with: make run PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-alone.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@$(BIN)/python -m kernels.cpu_library || echo "Continuing on torch's own kernels, which are slower here."
	@touch $@

$(TEST_STAMP): $(RUN_STAMP) requirements-test.txt requirements-test-alone.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-test-alone.txt
	@touch $@

# On a GPU host, instead of `install`; `headrace bench kernels` and compose/h200.toml then work.
install-gpu: transfer-library
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-gpu.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-gpu-alone.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-alone.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@$(BIN)/python -m kernels.cpu_library && $(BIN)/python -m kernels.cuda_library
	@touch $(RUN_STAMP)

# Mooncake needs libibverbs.so.1 even over TCP. Without it the mesh runs on the `grpc` transfer, with a warning.
transfer-library:
	@ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || sh compose/install-libibverbs.sh

# Regenerates headrace/v1 from protos; tests/core/test_protos.py fails when they differ.
protos: install-test
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. --pyi_out=. protos/headrace/v1/*.proto

# Golden values come from transformers, in an environment of its own.
golden:
	@test -x .venv-golden/bin/python || $(PYTHON) -m venv .venv-golden
	@.venv-golden/bin/python -m pip install --quiet -r tests/golden/requirements.txt
	@.venv-golden/bin/python tests/golden/make_golden.py

# The rival of `headrace bench engine --against llama.cpp`, likewise.
llama:
	@test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	@.venv-llama/bin/python -m pip install --quiet -r bench/requirements-llama.txt

lint: install-test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf .venv .venv-golden .venv-llama build *.egg-info
