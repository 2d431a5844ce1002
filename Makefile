# The front door. `make demo` trains a model with MSA and writes report/; `make test` runs every test
# this machine can run. Both set up all they need. PYTHON=... uses a Python that already has torch,
# tvm-ffi and pytest, and then nothing is installed.
SHELL := /bin/bash
ifdef PYTHON
  PY := $(PYTHON)
  SETUP := :
  export PYTHONPATH := $(CURDIR)/python:$(PYTHONPATH)
else
  PY := $(CURDIR)/.venv/bin/python
  SETUP := scripts/setup.sh
endif
# CI compiles the CUDA backend too, wherever nvcc is found.
NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
PRESET ?= $(if $(CI),$(if $(NVCC),ci,ci-cpu),dev)
BUILD := build/dev
JOBS ?= $(shell nproc)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup build demo test test-all test-gpu nightly check fuzz sanitize-gpu bench bench-gpu \
        format lint docs wheel example-cpp clean

help:           ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup:          ## Debian packages and .venv
	@$(SETUP)

build: setup    ## the C++ library, its tests and the binding
	@cmake --preset $(PRESET) -DPython3_EXECUTABLE="$$(command -v $(PY))" > build.log 2>&1 || { cat build.log; exit 1; }
	@grep "Thresher:" build.log || true
	@cmake --build $(BUILD) -j $(JOBS)

demo: build     ## train a byte-level language model with MSA, write report/
	$(PY) examples/train_lm.py --out report $(ARGS)

test: build lint ## every fast test this machine can run
	ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)
	$(MAKE) --no-print-directory example-cpp
	$(PY) -m pytest -m "not slow" $(ARGS)

test-all: build lint ## the slow suites too
	ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)
	$(PY) -m pytest $(ARGS)

test-gpu:       ## the contract suite on the GPU of this machine
	@$(MAKE) --no-print-directory build PRESET=gpu
	ctest --test-dir $(BUILD) --output-on-failure -L gpu
	THRESHER_TEST_DEVICE=cuda $(PY) -m pytest tests/contract $(ARGS)

check: build    ## sanitizers over the C++ tests, valgrind, fuzz drivers; PARTS="asan tsan valgrind"
	JOBS=$(JOBS) scripts/check.sh $(BUILD) $(PARTS)

fuzz: setup     ## libFuzzer on problem descriptions and block indices; SECONDS_PER_TARGET=60
	JOBS=$(JOBS) scripts/fuzz.sh $(or $(SECONDS_PER_TARGET),60) $(TARGETS)

nightly: build  ## 100,000 random problems against float64 (ARGS="--first N --count 1": one again)
	PYTHONPATH=$(CURDIR)/python:$(CURDIR)/tests $(PY) -m contract.random_problems $(ARGS)

sanitize-gpu:   ## compute-sanitizer over small problems of every CUDA kernel
	@$(MAKE) --no-print-directory build PRESET=gpu
	scripts/sanitize_gpu.sh $(BUILD) $(TOOLS)

example-cpp: build ## examples/cpp against the installed tree
	@scripts/example_cpp.sh $(BUILD)

docs:           ## the reference of the C++ API, build/docs/html; an undocumented name is an error
	@if ! command -v doxygen >/dev/null; then echo "docs: skipped, no doxygen (apt-get install doxygen)"; else \
	mkdir -p build && doxygen docs/Doxyfile && echo "docs: build/docs/html/index.html"; fi

wheel: setup    ## dist/thresher-*-py3-none-*.whl
	$(PY) -m pip wheel --no-deps --no-build-isolation -w dist .

bench: build    ## the CPU step beside dense attention
	$(PY) bench/cpu_step.py $(ARGS)

bench-gpu:      ## the GPU step beside dense cuDNN attention
	@$(MAKE) --no-print-directory build PRESET=gpu
	$(PY) bench/gpu_step.py $(ARGS)

format: setup   ## clang-format and ruff, in place
	@git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format -i
	ruff format . && ruff check --fix .

lint: setup     ## the same, only checked
	@git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format --dry-run -Werror
	ruff format --check . && ruff check .

clean:          ## all that was built
	rm -rf build dist build.log python/thresher/_lib
