# make demo    train a tiny transformer with ring attention over two processes
# make test    run the suite on CPUs
# make soak    run the long tests of the suite
# make deepspeed  test engine=deepspeed on the CPU
# make torchtitan  test examples/torchtitan_cp.py, in an environment of its own
# make hf-old  run the tests of Hugging Face models and trainers with the oldest transformers
# make check   lint code and words, type-check and test the direction of imports
# make kernels compile the head dim 128 kernels, judge their machine code, load one from a wheel, and
#              run their PTX on the CPU; needs g++ and no GPU
# make docs    build the site of docs/ and the API reference, in site/; warnings are errors
# make speed BASE=COMMIT  compare the speed with another commit, on a Hopper GPU, with PYTHON's packages
# make sizes   count the lines of each part of the tree, in commit 155589a too if git has it
# Each target first installs what it needs, and no more, into VENV, an environment of make's own:
# in an environment that you have made it would replace the PyTorch that is there.
# Variables:   PYTHON, VENV, TORCH (requirement), EXTRA_INDEX_URL (a further wheel index for TORCH),
#              BASE_LIBRARIES (compiled kernels of BASE: a folder or a wheel)

PYTHON ?= python3
TORCH ?= torch==2.13.0
EXTRA_INDEX_URL ?=
VENV := .venv-make
BIN := $(VENV)/bin
PIP_INDEX := $(if $(EXTRA_INDEX_URL),--extra-index-url $(EXTRA_INDEX_URL))
READY := $(VENV)/.ready-$(subst /,_,$(subst =,-,$(TORCH)))
INSTALL = $(BIN)/python -m pip install $(PIP_INDEX) "$(TORCH)" -e

# Two targets at once would install into one environment at once.
.NOTPARALLEL:
.PHONY: demo test soak deepspeed torchtitan test-torchtitan hf-old test-hf-old check docs kernels speed sizes clean

demo: $(READY)-demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 \
	  train/pretrain.py experiment=demo parallel.cp=2

test: $(READY)-test
	$(BIN)/python -m pytest -n 2 --dist worksteal

soak: $(READY)-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "soak and not gpu and not kernels and not deepspeed"

deepspeed: $(READY)-deepspeed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "deepspeed and not soak"

torchtitan:  # it needs an older version of datasets than `make test` takes
	$(MAKE) VENV=.venv-torchtitan test-torchtitan

test-torchtitan: $(READY)-torchtitan
	$(BIN)/python -m pytest tests/test_torchtitan.py

# The other files of tests/hf use functions and models that transformers 4 does not have.
HF_OLD_FILES = $(addprefix tests/hf/test_,batch.py context_parallel.py hf_trainers.py masks.py \
  models.py verify_model.py)
# Version 4 makes no bidirectional masks.
HF_OLD_TESTS = not encoder and not beside_padding

hf-old:
	$(MAKE) VENV=.venv-hf-old test-hf-old

test-hf-old: $(READY)-test
	$(BIN)/python -m pip install --quiet "transformers==4.57.6" "datasets>=4.7,<5"
	$(BIN)/python -m pytest -n 2 --dist worksteal $(HF_OLD_FILES) -k "$(HF_OLD_TESTS)"

check: $(READY)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell git ls-files "csrc/*" "benchmarks/*.cu*" "tests/planning/*.cpp" "tests/emulator/*.cpp" "tests/emulator/*.h")
	$(BIN)/mypy
	$(BIN)/python .ci/lint.py
	$(BIN)/python -m pytest tests/test_imports.py tests/train/test_train_imports.py

docs: $(READY)-docs
	$(BIN)/mkdocs build --quiet

UNITS = forward-d128-bf16 forward-d128-fp16 forward-d128-bf16-fp8 forward-d128-bf16-int8 \
  backward-d128-bf16 quantise-d128-bf16

kernels: $(READY)-compiler
	$(BIN)/python -m ringfa3.build --units $(UNITS) --check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "kernels and not soak"

speed:
	@test -n "$(BASE)" || { echo "make speed needs BASE=COMMIT, or BASE=FOLDER with a checkout"; exit 2; }
	@$(PYTHON) -m benchmarks.compare_commits "$(BASE)" $(if $(BASE_LIBRARIES),--libraries "$(BASE_LIBRARIES)")

sizes:
	@$(PYTHON) .ci/sizes.py

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "ringfa3 needs Python 3.10 or later; choose one with PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "Python's venv is missing. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(READY)-demo: $(READY)
	$(INSTALL) ".[train,plots]"
	@touch $@

$(READY)-test: $(READY)
	$(INSTALL) ".[train,plots,test]"
	@touch $@

$(READY)-deepspeed: $(READY)-test
	$(INSTALL) ".[deepspeed]"
	@touch $@

$(READY)-torchtitan: $(READY)
	$(INSTALL) ".[torchtitan,test]"
	@touch $@

$(READY)-docs: $(READY)
	$(INSTALL) ".[docs]"
	@touch $@

$(READY)-compiler: $(READY)-test
	$(INSTALL) ".[wheel]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-torchtitan .venv-hf-old runs site .mypy_cache .pytest_cache .ruff_cache
