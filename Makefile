# make demo    set up .venv, then train a tiny transformer with ring attention over two processes
# make test    set up .venv, then run every test that needs no GPU
# make deepspeed  set up .venv with deepspeed, then test engine=deepspeed on the CPU
# make check   set up .venv, then lint, type-check and test the direction of imports
# make kernels set up .venv with a CUDA compiler, then compile the head dim 128 kernels, judge their
#              machine code and run their PTX on the CPU; needs g++ and no GPU
# Variables:   PYTHON, TORCH (requirement), EXTRA_INDEX_URL (a further wheel index for TORCH)

PYTHON ?= python3
TORCH ?= torch==2.13.0
EXTRA_INDEX_URL ?=
VENV := .venv
BIN := $(VENV)/bin
PIP_INDEX := $(if $(EXTRA_INDEX_URL),--extra-index-url $(EXTRA_INDEX_URL))
READY := $(VENV)/.ready-$(subst /,_,$(subst =,-,$(TORCH)))

.PHONY: demo test deepspeed check kernels setup clean

demo: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 \
	  train/pretrain.py experiment=demo parallel.cp=2

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

deepspeed: $(READY)-deepspeed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "deepspeed and not soak"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(shell git ls-files "csrc/*" "benchmarks/*.cu*" "tests/planning/*.cpp" "tests/emulator/*.cpp" "tests/emulator/*.h")
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py tests/train/test_train_imports.py

UNITS = forward-d128-bf16 forward-d128-fp16 forward-d128-bf16-fp8 forward-d128-bf16-int8 \
  backward-d128-bf16 quantise-d128-bf16

kernels: $(READY)-compiler
	$(BIN)/python -m ringfa3.build --units $(UNITS) --check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "kernels and not soak"

setup: $(READY)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "ringfa3 needs Python 3.10 or later; choose one with PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "Python's venv is missing. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(PIP_INDEX) "$(TORCH)" -e ".[train,plots,test]"
	@touch $@

$(READY)-deepspeed: $(READY)
	$(BIN)/python -m pip install $(PIP_INDEX) "$(TORCH)" -e ".[deepspeed]"
	@touch $@

$(READY)-compiler: $(READY)
	$(BIN)/python -m pip install $(PIP_INDEX) "$(TORCH)" -e ".[build]"
	@touch $@

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache
