# Every target makes its own .venv first (once): nothing has to be installed before, but Python 3.9 or newer.
#   PYTHON=/path/to/python   the interpreter for .venv; by default CPython 3.10 where there is one, for OneFlow's sake
#   TESTS="tests/search -k exact"   what `make test`, `make test-fast` and `make stress` pass to pytest
#   RUNS=3                   how often `make stress` runs the tests on busy cores

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast stress bench faults docs lint clean setup

TESTS ?=
RUNS ?= 3
export PYTHON

help:
	@echo "make demo       a plan for GPT-3 13B on 8 nodes of 8 A100"
	@echo "make test       the tests (16 minutes on 2 cores); TESTS=\"tests/search -k exact\" for some of them"
	@echo "make test-fast  the tests that start no ranks and are not slow, for the edit loop"
	@echo "make stress     the tests on busy cores, 3 times (RUNS=3), and once on a single core"
	@echo "make bench      the benchmarks, with their tables and pictures"
	@echo "make faults     runs the tests of faults and writes docs/faults.md"
	@echo "make docs       runs the commands of README.md and docs/, and writes what they print"
	@echo "make lint       style and types"
	@echo "make clean      removes .venv and everything else that was made here"

setup:
	@.ci/setup .venv

demo: setup
	.venv/bin/autoddl plan gpt3-13b --cluster dgx-a100 --nodes 8 --devices-per-node 8 --batch 512

test: setup
	@.ci/test .venv $(TESTS)

test-fast: setup
	@.ci/test .venv -m "not ranks and not slow" $(TESTS)

stress: setup
	@.ci/stress .venv $(RUNS) $(TESTS)

bench: setup
	@for script in tests/bench/bench_*.py; do echo "== $$script"; .venv/bin/python "$$script" || exit 1; done

faults: setup
	@.ci/test .venv --faults -n 0 # one at a time: the page gives their seconds

docs: setup
	@.ci/test .venv tests/test_docs.py --write-docs -n 0

lint: setup
	@.ci/lint .venv

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
