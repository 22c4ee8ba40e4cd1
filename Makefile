# make demo      two ranks train a small GPT on the source of Python's standard library
# make finetune  two ranks fine-tune a small sentence model on docstrings; some minutes
# make test      the tests
# make long      the tests that take minutes, which make test leaves out
# make check     lint, format, types
# make docs      the pages, linted, as a site that needs no network: site/index.html
# make core      the tests that need no more than the package's own dependencies, in an environment without the others
# make bench     allstep against its peers on this machine, into benchmarks/results (ARGS=--quick: a minute each)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CORE ?= .venv-core
CORE_TESTS := tests/unit tests/cli/test_program.py $(addprefix tests/ranks/test_,$(addsuffix .py,trainer_equals_one_process \
	resume evaluation overrides accelerator logged_numbers gradients_match_reference))
PAGES := *.md docs benchmarks/results
# a browser fetches these when it opens a page
FETCHED := '<(script|img|iframe|source)[^>]* src="?(https?:)?//[^ ">]*|<link [^>]*rel="?(stylesheet|pre)[^>]*href="?(https?:)?//[^ ">]*'

.PHONY: demo finetune test long check docs core bench clean

demo: $(READY)
	$(BIN)/allstep launch --num_processes 2 examples/train_gpt.py $(ARGS)

finetune: $(READY)
	$(BIN)/allstep launch --num_processes 2 examples/finetune_minilm.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

long: $(READY)
	$(BIN)/python -m pytest -m long $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/pymarkdown scan -r $(PAGES)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@! grep -rnoE $(FETCHED) site --include=*.html || { echo "The site fetches what is above; it has to bring it."; exit 1; }
	@echo "The site is in site/index.html"

core: $(CORE)/.ready
	$(CORE)/bin/python -m pytest $(CORE_TESTS) $(ARGS)

bench: $(READY)
	for name in allreduce ddp trainer launch; do $(BIN)/allstep bench $$name --output benchmarks/results $(ARGS) || exit 1; done

# constraints.txt pins what is tested
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a minute, where packages are cached)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

$(CORE)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(CORE)"
	@$(PYTHON) -m venv $(CORE)
	@$(CORE)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(CORE)/.ready

clean:
	rm -rf $(VENV) $(CORE) site build dist outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis
