# `make demo` and `make test` set up what is missing, build, and run. `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build

BUILD ?= build
BUILD_TYPE ?= Release
PREFIX ?= /usr/local
JOBS ?= $(shell tools/jobs.sh)
TEST_JOBS ?= $(JOBS)
CTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
SANITIZERS ?= asan

# What ccache needs to serve files that use the precompiled torch header.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime,locale
export CCACHE_BASEDIR := $(CURDIR)

.PHONY: help setup configure build demo demo-moe test bench bench-ckpt python bench-python check format tidy sanitize install clean

help:
	@echo 'make demo     train the demo model on two ranks (first time: set-up and build)'
	@echo 'make demo-moe the same for a mixture of experts on four ranks'
	@echo 'make test     build and run all tests (CTEST_ARGS="-L unit" for a part of them)'
	@echo 'make bench    compare with PyTorch FSDP2; make bench-ckpt: save and load'
	@echo 'make python   build the Python package into $(BUILD)/python (use it with PYTHONPATH)'
	@echo 'make bench-python  the same Python program with FSDP2 and with ours'
	@echo 'make setup    install what is missing: packages, .venv, torch (HP_TORCH=... reuses one)'
	@echo 'make build    build everything into $(BUILD)/ (BUILD=, BUILD_TYPE=, JOBS=)'
	@echo 'make check    formatting, header tiers, documents; make format to fix the first'
	@echo 'make tidy     clang-tidy 14 over the library (slow)'
	@echo 'make sanitize the tests of comm, fsdp, nn and optim under sanitizers (slow; SANITIZERS=tsan: for threads)'
	@echo 'make install  install into PREFIX=$(PREFIX)'
	@echo 'make clean    remove $(BUILD)/'

setup:
	@tools/setup.sh

# Ninja re-runs CMake by itself when a CMake file changes.
configure: setup
	@test -f $(BUILD)/build.ninja || \
	  cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) --log-level=WARNING

build: configure
	@cmake --build $(BUILD) -j $(JOBS)

# The demo and the benchmark build only what they run.
demo: configure
	@cmake --build $(BUILD) -j $(JOBS) --target hp-train hp-ckpt
	@BUILD=$(BUILD) tools/demo.sh $(DEMO_ARGS)

demo-moe: configure
	@cmake --build $(BUILD) -j $(JOBS) --target hp-train hp-ckpt
	@BUILD=$(BUILD) DEMO=demo-moe RANKS=$${RANKS:-4} tools/demo.sh $(DEMO_ARGS)

test: build
	@tools/run_tests.sh $(BUILD) -j $(TEST_JOBS) $(CTEST_ARGS)

bench: configure
	@cmake --build $(BUILD) -j $(JOBS) --target step_bench micro_bench
	@BUILD=$(BUILD) bench/run.sh $(BENCH_ARGS)

bench-ckpt: configure
	@cmake --build $(BUILD) -j $(JOBS) --target ckpt_bench
	@bench/ckpt.py --build $(BUILD) $(BENCH_ARGS)

# For PYTHONPATH; pip install . makes and installs a wheel.
python: configure
	@cmake --build $(BUILD) -j $(JOBS) --target hp_python

bench-python: python
	@.venv/bin/python bench/python_bench.py --build $(BUILD) $(BENCH_ARGS)

check: setup
	@tools/check_format.py
	@tools/check_headers.py
	@tools/check_docs.py

format:
	@tools/check_format.py --fix

tidy: build
	@clang-tidy-14 -p $(BUILD) --quiet $$(find src -name '*.cpp' -not -path 'src/train/*')

# A build of its own, in build-asan/ (build-tsan/).
sanitize: setup
	@for preset in $(SANITIZERS); do tools/sanitize.sh $$preset $(CTEST_ARGS); done

install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	@rm -rf $(BUILD) $(BUILD)-wheel
