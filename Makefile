# Everything a newcomer or the CI needs. `make demo` and `make test` set up .venv by themselves; needs Python >= 3.11 and pip.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
# One worker per core, each with one thread: the tests are small, so threads inside a test only get in each other's way.
WORKERS ?= auto

# Real consumers of the layouts that install within minutes and share the project's environment.
CONSUMERS := compressed-tensors gguf mlx onnx
# Those that are larger, or want other versions of what the project itself uses: each has an environment of its own.
APART := auto_round gptqmodel vllm

.PHONY: all demo test lint docs conformance conformance-all clean

all: demo test lint

demo: $(VENV)/.installed
	$(BIN)/cann-llm-quant demo

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --ignore tests/conformance

# Loads what is exported with the consumers' own code and prints which did, and how far their logits are from ours. A file's
# tests stay with one worker, as each starts its consumer once.
conformance: $(VENV)/.installed-consumers
	CONFORMANCE_VLLM_ASCEND=$(CURDIR)/.venv-vllm-ascend OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/conformance

conformance-all: $(VENV)/.installed-consumers $(APART:%=.venv-%/.installed)
	CONFORMANCE_VLLM_ASCEND=$(CURDIR)/.venv-vllm-ascend CONFORMANCE_AUTO_ROUND=$(CURDIR)/.venv-auto_round/bin/python \
	CONFORMANCE_GPTQMODEL=$(CURDIR)/.venv-gptqmodel/bin/python CONFORMANCE_VLLM=$(CURDIR)/.venv-vllm/bin/python \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/conformance

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_cli_docs.py --check

docs: $(VENV)/.installed
	$(BIN)/python tools/generate_cli_docs.py

$(VENV)/.installed-consumers: $(VENV)/.installed-dev $(CONSUMERS:%=tests/conformance/requirements-%.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(CONSUMERS:%=-r tests/conformance/requirements-%.txt)
	$(BIN)/python tests/conformance/ascend_fetch.py .venv-vllm-ascend
	@touch $@

.venv-%/.installed: tests/conformance/requirements-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet -r $<
	@touch $@

# It wants torch's build for processors (2.13.0+cpu), which pip must find: PIP_EXTRA_INDEX_URL may name torch's own index. What
# pip finds of the other three is for another build, and vLLM loads a text model without them.
.venv-vllm/.installed: tests/conformance/requirements-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -r $<
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; set it with 'make PYTHON=/path/to/python3'" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The stamps are as old as the files that decide what is installed, so a second `make` installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed
