# make train · make quick · make test · make stack · make test-all · make mutants · make lint · make bench · make bench-quick · make bench-test ·
# make gpu · make docs · make release; each installs what it needs first: into .venv, and for the tests Debian's packages (launch/test_packages.sh).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
# 1: .venv sees what PYTHON has installed, such as a container's torch, Transformer Engine and apex
SYSTEM_SITE_PACKAGES ?=
# of torch, 2.11.0 or newer, in place of what constraints.txt pins
TORCH_VERSION ?=
KERNELS := $(filter-out kernels/__init__.py,$(wildcard kernels/*.py))

# where Debian keeps sshd and tc; a shell that became root by a plain `su` does not look there
export PATH := $(PATH):/usr/sbin:/sbin
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 20

ifeq ($(origin PYTHON) $(wildcard $(BIN)/python),command line $(BIN)/python)
ifneq ($(shell $(PYTHON) -V),$(shell $(BIN)/python -V))
$(error $(VENV) has $(shell $(BIN)/python -V), and $(PYTHON) is $(shell $(PYTHON) -V): name another folder, VENV=…)
endif
endif

.PHONY: install constraints train test-packages quick test stack release test-all mutants lint bench bench-quick bench-test gpu docs clean

install: $(VENV)/.installed
$(VENV)/.installed: setup.py constraints.txt launch/install.sh launch/cuda_driver.py
	PYTHON=$(PYTHON) PIP_ARGS="$(PIP_ARGS)" SYSTEM_SITE_PACKAGES="$(SYSTEM_SITE_PACKAGES)" \
	  TORCH_VERSION="$(TORCH_VERSION)" bash launch/install.sh $(VENV)
	touch $@

# One file for each Python that setup.py allows; of a package that differs by Python, a line each. Pins stay where they
# can: UV_ARGS="--upgrade" takes the newest, UV_ARGS="--upgrade-package NAME" those of one package.
UV ?= uv
constraints:
	$(UV) pip compile --quiet setup.py --extra dev --universal --python-version 3.11 --no-annotate --no-header \
	  -c constraints.in -o constraints.txt $(UV_ARGS)
	sed -i -E "/^(nvidia|cuda)-/{/^nvidia-ml-py==/!d}; s/ ; python_full_version < '3.14'.*//; s/ ; (python_full_version [<>=]+ '[0-9.]+').*/ ; \1/" \
	  constraints.txt

train: install
	$(BIN)/geotrain quickstart

test-packages:
	bash launch/test_packages.sh

# Packages come first: a C compiler builds the kernels at installation. Tests start many processes: the modules that they
# share are compiled once, also where the environment says otherwise.
test: test-packages install
	bash launch/test_converter.sh $(BIN)/python $(VENV)/llama.cpp
	bash launch/test_skypilot.sh $(BIN)/python $(VENV)/skypilot
	$(PYTEST) $(PYTEST_ARGS)

# Other Pythons with their libraries (tests/stack): what touches these, a launched run, and trainings that go from this
# one's to theirs and back.
stack: test-packages install
	$(BIN)/python -m tests.stack $(STACK_ARGS)

# An sdist and manylinux wheels in dist/, checked, installed and tried. RELEASED: a wheel for each.
RELEASED ?= $(PYTHON)
release:
	bash launch/release.sh $(RELEASED)

# Long tests too: faults at length, whole spaces of kernels, the notebook, browsers, Hypothesis' full profile; `make gpu`,
# shortened, on the processor.
test-all: test-packages install
	bash launch/test_converter.sh $(BIN)/python $(VENV)/llama.cpp
	bash launch/test_skypilot.sh $(BIN)/python $(VENV)/skypilot
	$(PYTEST) --all tests benchmarks/tests/test_gpu.py $(PYTEST_ARGS)

# The tests that execute what has changed since a commit (SINCE; default: where the branch left main), within a minute.
# RENEW=--renew records anew which lines each test executes, where that is not known (build/contexts); at first, all.
quick: install
	$(BIN)/python -m tests.contexts $(if $(SINCE),--since $(SINCE)) $(RENEW)

# Seeds faults, one at a time: SAMPLE of them, drawn over the product's lines by SEED, or without a SAMPLE those of
# tests/mutants/faults.toml. The last line counts what the tests noticed.
mutants: test-packages install
	$(if $(SAMPLE),$(BIN)/python -m tests.contexts --renew)
	$(BIN)/python -m tests.mutants $(if $(SAMPLE),--sample $(SAMPLE) --seed $(or $(SEED),0)) $(MUTANTS_ARGS)

# mypy sees the packages as they are installed: kernels and launch inside geotrain.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck && mkdir -p build/typecheck
	cp -rs $(CURDIR)/geotrain $(CURDIR)/tests $(CURDIR)/benchmarks build/typecheck/ && cp -rs $(CURDIR)/kernels $(CURDIR)/launch build/typecheck/geotrain/
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml

# One table of all figures and their goals.
bench: test-packages install
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Only shows that all of them work and give every figure that has a goal. One looks at the status page in a browser.
bench-quick: test-packages install
	$(BIN)/python -m benchmarks --quick $(BENCH_ARGS)

# The tests of benchmarks and studies, which `make test` leaves out.
bench-test: test-packages install
	$(PYTEST) benchmarks $(PYTEST_ARGS)

# Rows of benchmarks/results.csv, and a page of its own. WHEELS: a folder that `launch/wheels.sh collect` filled, for a
# machine that reaches no package index; then PYTHON's own torch is used, and nothing is installed but into build/site.
WHEELS ?=
GPU := -m benchmarks.gpu --record --page docs/gpu_measured.md $(GPU_ARGS)
ifdef WHEELS
gpu:
	bash launch/wheels.sh install $(WHEELS) build/site $(PYTHON)
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/site $(PYTHON) $(GPU)
else
gpu: install
	$(BIN)/python $(GPU)
endif

# The API reference, in build/docs. pdoc warns of what it cannot read or resolve: warnings are errors. kernels lists what
# it exports, so its modules are named one by one.
docs: install
	rm -rf build/docs
	DS_ACCELERATOR=cpu $(BIN)/python -W error::UserWarning -m pdoc --no-show-source -o build/docs \
	  geotrain geotrain.launch geotrain.kernels $(addprefix geotrain.,$(subst /,.,$(KERNELS:.py=))) '!geotrain.__main__'

clean:
	rm -rf $(VENV) build runs *.egg-info
