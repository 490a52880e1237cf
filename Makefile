# make demo, make test: the first two things to type. Everything is installed into .venv.
#   make test TORCH=2.15.0 TORCH_INDEX=https://...    another torch
SHELL := bash
PYTHON ?= python3
TORCH ?= 2.13.0
TORCH_INDEX ?=
JOBS ?= $(shell nproc)
# Sources together, sixteen at a time: less than half the time of a first build. For work on the core: make setup UNITY=OFF, which does not
# optimize across files either, so that a change is built soon; what is measured of such a build is up to a tenth slower.
UNITY ?= ON
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
SEEDS ?= 10000
KILLS ?= 200
SANITIZERS ?= address,undefined thread
PYTEST := $(BIN)/pytest
# Tests wait for other processes as well as compute: one more than processors keeps these busy.
SIDE_BY_SIDE := -n $(shell expr $(JOBS) + 1) --maxprocesses 4 --dist worksteal
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of Pythons start here.
unexport PYTHONDONTWRITEBYTECODE
# One processor installs packages while the other compiles.
MAKEFLAGS += -j2

NATIVE := $(shell find native bindings -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name CMakeLists.txt)

.PHONY: setup docs test demo tables soak sanitize lint format sim clean native-test
.DELETE_ON_ERROR:

setup: $(STAMPS)/package-$(TORCH) $(STAMPS)/extras

# With numpy: torch is imported for the build, and is not to find it half installed.
$(STAMPS)/venv:
	scripts/check_machine.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.11" "cffi>=1.15" "numpy>=1.24" "cmake>=3.18" ninja
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch-$(TORCH): $(STAMPS)/venv
	$(BIN)/python scripts/install_torch.py $(TORCH) $(TORCH_INDEX)
	@rm -f $(STAMPS)/torch-* $(STAMPS)/package-* && touch $@

# Without isolation: with this environment's torch, cmake and ninja, so that the next build only compiles what changed.
$(STAMPS)/package-$(TORCH): $(STAMPS)/torch-$(TORCH) pyproject.toml CMakeLists.txt $(NATIVE)
	PATH="$(CURDIR)/$(BIN):$$PATH" CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	    $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -C cmake.define.FTCOMM_TESTS=ON \
	    -C cmake.define.CMAKE_UNITY_BUILD=$(UNITY) -C cmake.define.FTCOMM_LTO=$(UNITY) --editable .
	@touch $@

# Of some ten thousand files the tests import a tenth, and Python compiles these then: half a minute of a processor less. Two without
# what they depend on: torchvision has to match torch, and of timm the tests read Lamb and Lars only, of torchdata its loader.
$(STAMPS)/extras: $(STAMPS)/torch-$(TORCH) pyproject.toml scripts/requirements.py
	$(BIN)/python scripts/requirements.py test plot mpi store progress > $(STAMPS)/requirements.txt
	$(BIN)/python -m pip install --quiet --no-compile --requirement $(STAMPS)/requirements.txt
	$(BIN)/python -m pip install --quiet --no-compile --no-deps "timm>=1.0.31" "torchdata>=0.11"
	@touch $@

test: setup native-test
	$(PYTEST) -q $(SIDE_BY_SIDE) --durations 20

# The package's own build has made them.
native-test: setup
	@"$$(find build -path 'build/sanitize-*' -prune -o -name ftcomm-unit -type f -print -quit)"

demo: setup
	$(BIN)/python examples/demo.py

tables: setup
	$(PYTEST) -q $(SIDE_BY_SIDE) -m table

soak: setup
	FTCOMM_SOAK_KILLS=$(KILLS) $(PYTEST) -q -m soak

sim: setup
	$(BIN)/ftcomm sim --seeds $(SEEDS)

# Unit tests and simulator under each set of sanitizers.
sanitize: setup
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; set -e; for which in $(SANITIZERS); do \
	    folder=build/sanitize-$${which//,/-}; \
	    cmake -S . -B $$folder -G Ninja -DFTCOMM_TESTS=ON -DFTCOMM_TORCH=OFF -DFTCOMM_SANITIZE=$$which -DCMAKE_BUILD_TYPE=RelWithDebInfo; \
	    cmake --build $$folder -j $(JOBS); \
	    "$$(find $$folder -name ftcomm-unit -type f)"; \
	    "$$(find $$folder -name ftcomm-sim -type f)" --seeds 200; \
	done

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml
	$(BIN)/python -m pip install --quiet "ruff>=0.15" mypy types-cffi "clang-format==23.*"
	@touch $@

lint: setup $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find native bindings \( -name '*.cc' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run --Werror

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find native bindings \( -name '*.cc' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format -i

# The API reference and the tables that come from the code.
docs: setup
	$(BIN)/python scripts/make_api_docs.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
