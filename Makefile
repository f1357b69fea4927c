# make demo      plan a small GPT for 4 CPU ranks, train it under torchrun/gloo, print predicted beside measured
# make test      every check and the covering test suite
# make test-all  as `test`, with the full matrix (tests marked slow)
# make lint      the checks alone
#
# Each does its own set-up in .venv on a fresh machine with Python >= 3.11, make and gcc; run again, it is skipped.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
OUT := out
# Tests of a file stay on one worker but for the last ones, so that what they share is made once.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=15

# Compiled modules are kept: a suite that starts some 40 interpreters would compile autopar 40 times.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint format setup clean
.DELETE_ON_ERROR:

setup: $(READY)

# Of 10,000 modules that are installed, a quarter is ever imported; Python compiles those then.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autopar: needs Python >= 3.11, and $(PYTHON) is older; set PYTHON=python3.12, say" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,hf]'
	@touch $@

demo: $(READY) $(OUT)/calibration.json
	$(BIN)/autopar plan examples/gpt.py:build -c $(OUT)/cluster.yaml --batch 16 -o $(OUT)/demo.json
	$(BIN)/autopar run $(OUT)/demo.json -- examples/gpt.py --steps 20

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/lint-imports

# What this machine does is measured once; `make clean demo` measures it again.
$(OUT)/calibration.json: | $(READY)
	@mkdir -p $(OUT)
	$(BIN)/autopar cluster detect --cpu-ranks 4 --calibration calibration.json -o $(OUT)/cluster.yaml
	$(BIN)/autopar calibrate --quick -c $(OUT)/cluster.yaml -o $@

test: lint
	$(PYTEST) -m 'not slow'

test-all: lint
	$(PYTEST)

format: $(READY)
	$(BIN)/ruff check --fix -q .
	$(BIN)/ruff format -q .

clean:
	rm -rf $(OUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
