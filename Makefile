# make demo    two ranks train a small GPT on the source of Python's standard library
# make test    the tests
# make long    the tests that take minutes, which make test leaves out
# make check   lint, format, types
# make bench   allstep against its peers on this machine, into benchmarks/results (ARGS=--quick: a minute each)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test long check bench clean

demo: $(READY)
	$(BIN)/allstep launch --num_processes 2 examples/train_gpt.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

long: $(READY)
	$(BIN)/python -m pytest -m long $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	for name in allreduce ddp trainer launch; do $(BIN)/allstep bench $$name --output benchmarks/results $(ARGS) || exit 1; done

# constraints.txt pins what is tested
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a minute, where packages are cached)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
