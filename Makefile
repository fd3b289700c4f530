# make train · make test · make lint · make bench; each installs what it needs into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=

.PHONY: install train test lint bench clean

install: $(VENV)/.installed

$(VENV)/.installed: setup.py constraints.txt launch/install.sh
	PYTHON=$(PYTHON) PIP_ARGS="$(PIP_ARGS)" bash launch/install.sh $(VENV)
	touch $@

train: install
	$(BIN)/geotrain quickstart

test: install
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# mypy sees the packages as they are installed: kernels and launch inside geotrain.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typecheck && mkdir -p build/typecheck
	cp -rs $(CURDIR)/geotrain build/typecheck/ && cp -rs $(CURDIR)/kernels $(CURDIR)/launch build/typecheck/geotrain/
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml

bench: install
	for b in $(filter-out benchmarks/common.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$b || exit 1; done

clean:
	rm -rf $(VENV) build runs *.egg-info
