# The README's commands. Everything is installed into .venv, at the versions of requirements.lock.
PYTHON ?= python3
BIN = .venv/bin
# Two files of tests at a time: half of the time a test has one process at work, or waits.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: train test test-full setup check format bench clean

train: setup
	$(BIN)/python -m launcher +experiment=dna_8k

# Fast tests first, so that a fault shows early; then those that start DeepSpeed ranks, with all that these compile.
test: setup
	$(PYTEST) -m "not slow and not ranks"
	$(MAKE) .venv/all_operators
	$(PYTEST) -m "not slow and ranks"

test-full: setup
	$(PYTEST) -m "not ranks"
	$(MAKE) .venv/all_operators
	$(PYTEST) -m "ranks"

setup: .venv/operators

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	for program in benchmarks/*.py; do $(BIN)/python $$program || exit 1; done

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# DeepSpeed compiles what every run on a CPU needs at its first use; here it is compiled where the user can see it.
.venv/operators: .venv/installed
	DS_ACCELERATOR=$$($(BIN)/python -c "from launcher.devices import visible_gpus; print('cuda' if visible_gpus() else 'cpu')") \
		$(BIN)/python -m launcher.worker.build
	touch $@

.venv/all_operators: .venv/operators
	DS_ACCELERATOR=cpu $(BIN)/python -m launcher.worker.build CPUAdamBuilder PinMemoryBuilder AsyncIOBuilder
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
