# Every target makes the virtual environment it needs. PY=python3 uses that interpreter as it is, without one.
VENV ?= .venv
BASE_PYTHON ?= python3
PY ?= $(VENV)/bin/python
CLUSTER_ENV = RAY_AUTH_MODE=disabled RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 PYTHONPATH=$(CURDIR):$(PYTHONPATH)
# One thread per test process: two processes with a pool each would fight for the same cores.
TEST_ENV = $(CLUSTER_ENV) OMP_NUM_THREADS=1
JOBS ?= 2
# EXTRA=cuda12, for drivers of CUDA 12, brings an older torch than the constraints name.
EXTRA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda)
CONSTRAINTS = $(if $(filter cuda12,$(EXTRA)),,-c constraints.txt)
# Of torch and Ray most modules are never imported: Python compiles the others when they are, and
# keeps what it compiled, also where a container's environment forbids it, or each process would
# compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(PY) -m pip install --progress-bar off --no-compile $(CONSTRAINTS)
# All share the first GPU: most of their time is compilation.
GPU_JOBS ?= 4

ifeq ($(PY),$(VENV)/bin/python)
READY = $(VENV)/ready
DEV_READY = $(VENV)/dev-ready
endif

.PHONY: help demo serve test test-gpu check format protos docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1: \2/p' $(MAKEFILE_LIST)

demo: $(READY) ## a local cluster answers prompts that share a prefix; MODEL=DIR for a real checkpoint
	$(CLUSTER_ENV) $(PY) -m cluster demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

serve: $(READY) ## make serve MODEL=DIR ARGS="--prefill 1 --decode 1"
	$(CLUSTER_ENV) $(PY) -m cluster serve $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(DEV_READY) ## the suite for hosts without GPUs
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not gpu and not cluster" $(ARGS)
	$(TEST_ENV) $(PY) -m pytest -m "cluster and not gpu" $(ARGS)

test-gpu: $(DEV_READY) ## the suite for hosts with GPUs
	$(TEST_ENV) $(PY) -m pytest -n $(GPU_JOBS) -m "gpu and not cluster" $(ARGS)
	$(TEST_ENV) $(PY) -m pytest -m "gpu and cluster" $(ARGS)

check: $(DEV_READY) ## format, lint, types, import contracts, generated code
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
	$(PY) -m protos.generate --check

format: $(DEV_READY) ## write the code in the project's format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

protos: $(DEV_READY) ## regenerate protos/*_pb2*
	$(PY) -m protos.generate

docs: $(DEV_READY) ## rewrite docs/configuration.md from the configuration classes
	$(PY) -m cluster.reference

$(VENV)/bin/python:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(BASE_PYTHON) is older than Python 3.11; set BASE_PYTHON"; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) torch -e ".$(if $(EXTRA),[$(EXTRA)])"
	touch $@

$(VENV)/dev-ready: pyproject.toml constraints.txt $(VENV)/ready
	$(PIP_INSTALL) -e ".[dev]"
	touch $@

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
