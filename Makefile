# The two commands of the README are `make run` and `make test`. Both create .venv first.
PYTHON ?= python3
BIN := .venv/bin
RUN_STAMP := .venv/.installed-run
TEST_STAMP := .venv/.installed-test
# There after `make install-gpu`: then its set stays, whatever else is made. It has another torch, triton and Mooncake.
GPU_STAMP := .venv/.installed-gpu
ON_GPU := $(wildcard $(GPU_STAMP))
RUN_SET := $(if $(ON_GPU),requirements-gpu.txt,requirements.txt)
ALONE := $(if $(ON_GPU),-r requirements-gpu-alone.txt) -r requirements-alone.txt
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# The linter of the protos comes through npm, where the host has it; its tests skip where it has not.
BUF_STAMP := tests/buf/node_modules/.package-lock.json
BUF := tests/buf/node_modules/.bin/buf
WITH_NPM := $(shell command -v npm 2>/dev/null)

.PHONY: run test test-full install install-test install-gpu transfer-library protos protos-baseline buf golden llama routers lint clean

run: install
	@$(BIN)/headrace demo

test: install-test
	@$(BIN)/python -m pytest

test-full: install-test
	@$(BIN)/python -m pytest --full --summary bench/results/test-full.json

install: $(RUN_STAMP) transfer-library

install-test: $(TEST_STAMP) $(if $(WITH_NPM),$(BUF_STAMP)) transfer-library

$(RUN_STAMP): $(RUN_SET) $(filter %.txt,$(ALONE)) pyproject.toml
	@echo "Creating .venv (this downloads torch once) ..."
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
		|| { echo "Headrace needs Python 3.11 or 3.12; say which with: make run PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install -r $(RUN_SET)
	@$(PIP) install --no-deps $(ALONE)
	@$(PIP) install --no-deps --editable .
	@$(BIN)/python -m kernels.toolchain.cpu_library || echo "Continuing on torch's own kernels, which are slower here."
ifneq ($(ON_GPU),)
	@$(BIN)/python -m kernels.linear.fp8_hopper || echo "Continuing on Triton and cuBLAS for FP8 products, which are slower."
	@$(BIN)/python -m kernels.linear.nvfp4_hopper || echo "Continuing on Triton for NVFP4 products, which is slower."
endif
	@touch $@

# On a CPU the tests run Triton's interpreter, of the version they know; on a GPU the triton that fits torch stays.
$(TEST_STAMP): $(RUN_STAMP) requirements-test.txt requirements-test-alone.txt requirements-test-triton.txt
	@$(PIP) install -r $(RUN_SET) -r requirements-test.txt
	@$(PIP) install --no-deps -r requirements-test-alone.txt
	@$(if $(ON_GPU),$(BIN)/python -c 'import triton' 2>/dev/null ||) $(PIP) install --no-deps -r requirements-test-triton.txt
	@touch $@

# On a GPU host, instead of `install`; `headrace bench kernels` and compose/h200.toml then work. Both builds of Mooncake own
# the same files: where the other one is, both go first.
install-gpu:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@! $(PIP) show mooncake-transfer-engine-non-cuda >/dev/null 2>&1 \
		|| $(PIP) uninstall --yes mooncake-transfer-engine-non-cuda mooncake-transfer-engine-cuda13
	@touch $(GPU_STAMP)
	@rm -f $(RUN_STAMP)
	@$(MAKE) install

# Mooncake needs libibverbs.so.1 even over TCP. Without it the mesh runs on the `grpc` transfer, with a warning.
transfer-library:
	@ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || sh compose/install-libibverbs.sh

# Regenerates headrace/v1 from protos; tests/core/test_protos.py fails when they differ.
protos: install-test
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. --pyi_out=. protos/headrace/v1/*.proto

# buf, of the version that tests/buf/package-lock.json pins by its hash.
buf: $(BUF_STAMP)

$(BUF_STAMP): tests/buf/package.json tests/buf/package-lock.json tests/buf/.npmrc
	@npm ci --silent --prefix tests/buf
	@touch $@

# The protos as they were released, which tests/core/test_buf.py compares with. For a release, or before the first: it forgets what was promised.
protos-baseline: $(BUF_STAMP)
	@$(BUF) build --exclude-source-info --output protos/baseline.binpb

# Golden values come from transformers, in an environment of its own.
golden:
	@test -x .venv-golden/bin/python || $(PYTHON) -m venv .venv-golden
	@.venv-golden/bin/python -m pip install --quiet -r tests/golden/requirements.txt
	@.venv-golden/bin/python tests/golden/make_golden.py

# The rival of `headrace bench engine --against llama.cpp`, likewise.
llama:
	@test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	@.venv-llama/bin/python -m pip install --quiet -r bench/requirements-llama.txt

# The rivals of `headrace bench stream`, likewise.
routers:
	@test -x .venv-routers/bin/python || $(PYTHON) -m venv .venv-routers
	@.venv-routers/bin/python -m pip install --quiet -r bench/requirements-routers.txt

lint: install-test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf .venv .venv-golden .venv-llama .venv-routers tests/buf/node_modules build *.egg-info
