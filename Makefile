# Everything happens in .venv, made with the first Python that will do. Each install leaves a stamp there and is
# repeated when pyproject.toml changes; the code itself is installed editable and needs no repeat.

SHELL := /bin/bash
VENV := .venv
PYTHON ?=
# pip compiles every module that comes, one after the other, which takes as long as the rest. For a demo Python compiles what is
# used, when it is first imported, unless it may not write; what tests use is compiled on all cores.
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile
COMPILE := $(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true
# Three for two cores, since many a test waits; at most four, since each holds models and compiled programs.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$(( cores > 2 ? 4 : cores + 1 )))
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS)
CANDIDATES := $(PYTHON) python3 python3.12 python3.11 python3.13 python3.14 python

.PHONY: help demo serve test check check-tests check-clients check-parity test-all lint parity real real-small test-clients
.PHONY: gpu-compiler docs dist clean

help:
	@echo "make demo     watch the bundled model write a story"
	@echo "make serve    the same model behind HTTP, with a page to look at"
	@echo "make test     linters, types, and the quick tests, of every part: for each change"
	@echo "make check    and what needs more: chaos, browser, Ray, hosts, devices, sanitizers, clients, parity. Its parts:"
	@echo "              lint, check-tests (TESTS=tests/engine for a folder), check-clients, check-parity, real-small"
	@echo "make test-all every case of all of that, and every random one: hours"
	@echo "make parity   the same tokens as transformers? (installs torch)"
	@echo "make real     models with trained weights (fetches 1.8 GB, builds llama.cpp); real-small: its two smallest (180 MB)"
	@echo "make test-clients  litellm, LangChain and others, each installed by itself"
	@echo "make gpu-compiler  what compiles for NVIDIA GPUs without one (about 230 MB to fetch): make check then covers it"
	@echo "make docs     the documentation as a site, in build/docs/site; a dead link is an error"
	@echo "make dist     wheels and an sdist in dist/: on x86-64 Linux with compiled kernels too, x86's and with a cross compiler ARM's"
	@echo "make clean    remove what the others made"
	@echo "PYTHON=/path/to/python chooses the Python for .venv (3.11 or newer)"

demo: $(VENV)/.demo
	@$(VENV)/bin/quire generate --prompt "Once upon a time" --echo --max-tokens 200 --temperature 0.5 --seed 1

serve: $(VENV)/.demo
	@$(VENV)/bin/quire serve

# A file's tests share servers and models: a worker has all of them.
BY_FILE := --dist loadfile --no-loadscope-reorder --durations=10
test: lint
	QUIRE_CASES=0.1 $(PYTEST) $(BY_FILE) -m "not slow and not nightly"

# The parts of a check, which CI runs side by side: TESTS are the folders or files of check-tests.
TESTS :=
check:
	$(MAKE) -j 2 lint check-clients  # pyright uses one core
	$(MAKE) check-tests
	$(MAKE) check-parity
	$(MAKE) real-small

check-tests: $(VENV)/.test
	QUIRE_CASES=0.1 $(PYTEST) $(BY_FILE) -m "not nightly" $(TESTS)

check-clients: $(VENV)/.test
	$(PYTEST) -m "not nightly" tests/clients

check-parity: $(VENV)/.parity
	$(PYTEST) --dist worksteal -m "not nightly" tests/parity

test-all: lint parity test-clients real
	$(PYTEST) $(BY_FILE)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@mkdir -p .pkg && ln -sfn "$$PWD" .pkg/quire  # so that pyright finds this folder under its import name
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

parity: $(VENV)/.parity
	$(PYTEST) --dist worksteal tests/parity

# One process at a time: each test holds a model, and another engine computes the same one beside it. Where a model cannot be
# fetched its tests are left out; with QUIRE_NEEDS_REAL_MODELS, as in .ci/run, that is an error for those that are to be there.
real-small: $(VENV)/.parity
	$(VENV)/bin/python tests/support/real_models.py smollm2 minilm
	$(VENV)/bin/python -m pytest -m "not large" --durations=5 tests/real

real: $(VENV)/.real
	$(VENV)/bin/python tests/support/real_models.py
	$(VENV)/bin/python -m pytest --durations=10 tests/real

test-clients: $(VENV)/.test
	$(PYTEST) tests/clients

gpu-compiler: $(VENV)/.gpu-compiler

docs: $(VENV)/.docs
	@$(VENV)/bin/python -m tools.docs.build

# On x86-64 Linux also a wheel with kernels for every kind of x86 processor, and one for ARM's if there is a cross compiler:
# some minutes of compilation each. Elsewhere the wheel for all is the only one.
KERNELS := amx avx512_bf16 avx512_vnni avx512 avx2 baseline
ARM_KERNELS := bf16 dotprod neon
ARM_CXX := aarch64-linux-gnu-g++
dist: $(VENV)/.test
	rm -rf build dist  # a stale build/ would ship old files
	$(VENV)/bin/python -m build
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  set -e; $(VENV)/bin/quire build-kernels --out build/kernels $(KERNELS:%=--isa %) >/dev/null; \
	  $(VENV)/bin/python -m tools.release.wheel dist/*-py3-none-any.whl build/kernels; \
	  if ! command -v $(ARM_CXX) >/dev/null; then \
	    echo "no wheel for aarch64: there is no $(ARM_CXX) (on Debian and Ubuntu: apt install g++-aarch64-linux-gnu)"; exit; \
	  fi; \
	  CXX=$(ARM_CXX) $(VENV)/bin/quire build-kernels --out build/kernels-aarch64 $(ARM_KERNELS:%=--isa %) >/dev/null; \
	  $(VENV)/bin/python -m tools.release.wheel dist/*-py3-none-any.whl build/kernels-aarch64; \
	fi

clean:
	rm -rf $(VENV) .pkg build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.demo: pyproject.toml | $(VENV)/.made
	@echo "Installing Quire and its libraries into $(VENV) (about 200 MB to fetch, once)."
	@$(PIP) -e .
	@$(if $(PYTHONDONTWRITEBYTECODE),$(COMPILE))
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.made
	@echo "Installing Quire, its libraries and the test tools into $(VENV), once."
	@$(PIP) -e '.[test]'
	@$(COMPILE)
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml | $(VENV)/.made
	@echo "Installing mkdocs into $(VENV), once."
	@$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/.demo

# torch alone and first: asked for together with the rest, pip may choose its CUDA build.
$(VENV)/.parity: $(VENV)/.test
	@echo "Installing torch and transformers into $(VENV), once."
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[test,parity]'
	@$(COMPILE)
	@touch $@

# llama.cpp is compiled from its source, which takes some minutes.
$(VENV)/.real: $(VENV)/.parity
	@echo "Building llama.cpp for Python into $(VENV), once."
	@$(PIP) llama-cpp-python==0.3.36
	@touch $@

# The plugin works with jax of its own version alone. It lies apart, or JAX would look for a GPU at each start.
$(VENV)/.gpu-compiler: $(VENV)/.test
	@echo "Installing the compiler for NVIDIA GPUs into $(VENV)/gpu-compiler, once."
	@rm -rf $(VENV)/gpu-compiler
	@version=$$($(VENV)/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	  $(PIP) --quiet --no-deps --target $(VENV)/gpu-compiler \
	    "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version" 'nvidia-cuda-nvcc-cu12>=12.9,<13'
	@touch $@

$(VENV)/.made:
	@for python in $(CANDIDATES); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	      echo "note: $$python lacks venv or ensurepip (on Debian and Ubuntu: apt install python3-venv)" >&2; continue; \
	    fi; \
	    echo "Making $(VENV) with $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')."; \
	    rm -rf $(VENV); "$$python" -m venv $(VENV) && touch $@ && exit 0; \
	  fi; \
	done; \
	echo "error: Quire needs Python 3.11 or newer with venv. Tried: $(CANDIDATES)." >&2; \
	echo "Install one, or name one: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
	exit 1
