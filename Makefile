# Every target makes its own .venv first (once): nothing has to be installed before, but Python 3.9 or newer.
#   PYTHON=/path/to/python   the interpreter for .venv; by default CPython 3.10 where there is one, for OneFlow's sake
#   TESTS="tests/search -k exact"   what `make test` passes to pytest

.DEFAULT_GOAL := help
.PHONY: help demo test bench faults lint clean setup

TESTS ?=
export PYTHON

help:
	@echo "make demo    a plan for GPT-3 13B on 8 nodes of 8 A100"
	@echo "make test    the tests; TESTS=\"tests/search -k exact\" for some of them"
	@echo "make bench   the benchmarks, with their tables and pictures"
	@echo "make faults  runs the tests of faults and writes docs/faults.md"
	@echo "make lint    style and types"
	@echo "make clean   removes .venv and everything else that was made here"

setup:
	@.ci/setup .venv

demo: setup
	.venv/bin/autoddl plan gpt3-13b --cluster dgx-a100 --nodes 8 --devices-per-node 8 --batch 512

test: setup
	@.ci/test .venv $(TESTS)

bench: setup
	@for script in tests/bench/bench_*.py; do echo "== $$script"; .venv/bin/python "$$script" || exit 1; done

faults: setup
	@.ci/test .venv --faults

lint: setup
	@.ci/lint .venv

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
