# make train · make test · make lint · make bench · make docs; each installs what it needs into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
# A benchmark is <name>.py; <name>_<part>.py are parts of it, which are not run by themselves, as the shared ones are not.
BENCHMARKS := $(shell ls benchmarks/*.py | grep -v -e /common.py -e /real_delta.py $(foreach b,$(wildcard benchmarks/*.py),-e '^$(b:.py=)_'))
KERNELS := $(filter-out kernels/__init__.py,$(wildcard kernels/*.py))

.PHONY: install train test lint bench docs clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.py constraints.txt launch/install.sh
	PYTHON=$(PYTHON) PIP_ARGS="$(PIP_ARGS)" bash launch/install.sh $(VENV)
	touch $@

train: install
	$(BIN)/geotrain quickstart

# Tests start many processes: the modules that they share are compiled once, also where the environment says otherwise.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20 $(PYTEST_ARGS)

# mypy sees the packages as they are installed: kernels and launch inside geotrain.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck && mkdir -p build/typecheck
	cp -rs $(CURDIR)/geotrain build/typecheck/ && cp -rs $(CURDIR)/kernels $(CURDIR)/launch build/typecheck/geotrain/
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml

bench: install
	for b in $(BENCHMARKS); do echo "== $$b" && $(BIN)/python $$b || exit 1; done

# The API reference, in build/docs. pdoc warns of what it cannot read or resolve: warnings are errors. kernels lists what
# it exports, so its modules are named one by one. _lm is called through ctypes and cannot be imported.
docs: install
	rm -rf build/docs
	DS_ACCELERATOR=cpu $(BIN)/python -W error::UserWarning -m pdoc --no-show-source -o build/docs \
	  geotrain geotrain.launch geotrain.kernels $(addprefix geotrain.,$(subst /,.,$(KERNELS:.py=))) '!geotrain.__main__' '!geotrain.simulate._lm'

clean:
	rm -rf $(VENV) build runs *.egg-info
