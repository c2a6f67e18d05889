# Everything runs in .venv, which the first target that needs it builds.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all golden lint format unit reproduce bench bench-quick bench-peers \
	test-browser test-federation test-federation-scale test-flower test-machines test-wheel soak fuzz coverage mutation verify wheel clean help

help:
	@echo "make demo       compare five methods on the embedded data (2 to 4 minutes)"
	@echo "make test       lint, types, and all tests except those of test-browser and test-federation"
	@echo "make test-all   the tests again with all cases of engines, rules and methods crossed"
	@echo "make verify     every slow suite, two at a time, one line each (about an hour)"
	@echo "make golden     all golden runs against tests/golden/golden.json (two minutes)"
	@echo "make unit       only the quick tests: unit and property tests (a good minute)"
	@echo "make reproduce  the paper's tables and our studies into docs/ (MPFEDCL_DATA; many hours, resumable)"
	@echo "make reproduce STUDY=label  one of them; STUDY='paper' all of the paper (two to three hours)"
	@echo "make reproduce STUDY=--help  their names; ARGS=--quick runs a few rounds to see that all works"
	@echo "make bench      where the time goes, growth, memory (an idle machine, an hour or two)"
	@echo "make bench-peers  the same work with Flower, pfl and a loop written by hand"
	@echo "make test-browser  the report and the live page in a real browser (installs Chromium on Debian)"
	@echo "make test-federation  a federation of processes, and its faults (a quarter of an hour)"
	@echo "make test-federation-scale  fifty clients, killed at random, in twenty runs (an hour)"
	@echo "make soak       a hundred kills at random moments, drop-outs in every round (a quarter of an hour)"
	@echo "make test-flower FLWR=1.42  the network and a federation with another version of Flower (ten minutes)"
	@echo "make test-machines  one run on two machines, each a network namespace (needs root)"
	@echo "make test-wheel  the wheel installed without extras, and used (three minutes)"
	@echo "make fuzz       mutated messages, files and settings against every reader (four minutes)"
	@echo "make coverage   branch coverage of validation, messages, checkpoint and privacy, in percent"
	@echo "make mutation   faults put into these modules that the tests detect (resumes where it stopped)"
	@echo "make attacks    attacks on security and privacy: expected and observed outcomes (five minutes)"
	@echo "make attacks-full  the same at length: the numbers of docs/leaks.md (MPFEDCL_DATA, with mnist)"
	@echo "make lock       write requirements.lock; make .venv-locked installs from it"
	@echo "make sbom       the bill of materials of .venv, build/sbom.json (CycloneDX)"
	@echo "make wheel      build the wheel"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mpfedcl needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/mpfedcl compare --methods fedgauss mp-fedcl fedavg fedproto local --seeds 0 1 2 \
		--partition.alpha 0.05 --evaluate-every 5 --predictors all --out demo
	@echo
	@echo "What this shows: five clients hold two or three digits each, and all are tested on all ten."
	@echo "- The first table and demo/accuracy.png have each method by its primary predictor on this test set."
	@echo "- fedgauss is one-shot and has no learning rate; the others train for 60 rounds."
	@echo "- mp-fedcl: look at its global model. Its personal models are below fedavg's global model: they"
	@echo "  were trained last on a client's own digits, and this test asks for all ten."
	@echo "- fedproto and local share no model, so clients do not learn the digits that they do not hold."
	@echo "Which method for which purpose: docs/tutorial.md. A page of all this: $(BIN)/mpfedcl report demo"

test: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# Also slow tests, and the cases of which make test takes every third: engines, rules, methods crossed.
test-all: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MPFEDCL_CASES=all $(BIN)/pytest -n 2 --dist loadfile -m 'not federation and not scale and not soak'

# A failed suite does not stop the others; logs are in build/verify. make verify ONLY='attacks fuzz' runs some.
verify: $(READY)
	$(BIN)/python scripts/verify.py $(if $(ONLY),--only $(ONLY))

# What the code gave when they were recorded, to 1e-10; tests/golden/explained.toml has what is meant to differ.
golden: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden/golden.py compare tests/golden/golden.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m 'not federation and not browser and not whole and not scale and not soak and not thorough'

# The paper's tables and figures and our own studies; the same command continues (reproduction/).
STUDY ?= all
reproduce: $(READY)
	$(BIN)/python -m reproduction $(STUDY) $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/run.py

bench-quick: $(READY)
	$(BIN)/python benchmarks/run.py --quick

# Peers are installed from the package index into venvs of their own.
bench-peers: $(READY)
	benchmarks/peers/install.sh
	$(BIN)/python benchmarks/peers/compare.py --repeats 3

# Uses the system's own browser; screenshots are left in screenshots/.
test-browser: $(READY)
	scripts/install_browser.sh
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	OMP_NUM_THREADS=1 $(BIN)/pytest -m browser tests/browser

# With root, ip (iproute2) and nginx, a cut network and a proxy are tested too.
test-federation: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m federation tests/federation --durations=0
	@cat build/faults.md

# Fifty clients, one killed each second: MPFEDCL_NODES and MPFEDCL_RUNS change the numbers.
test-federation-scale: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m scale -s tests/federation/test_scale.py

# A hundred random kills, each resumed to the same bits; drop-outs and stragglers in every round.
soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s tests/runs/test_random_kills.py tests/network/test_dropouts.py
	OMP_NUM_THREADS=1 MPFEDCL_EXAMPLES=soak $(BIN)/pytest -n 2 --dist loadfile tests/prototypes tests/gaussian tests/privacy tests/rounds

# What fails is kept in tests/fuzz/corpus, which make test tries again. Longer: make fuzz SECONDS_PER_TARGET=600.
SECONDS_PER_TARGET ?= 20
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzzer.py --seconds $(SECONDS_PER_TARGET)

coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/guard_tests.py coverage

# At most ten minutes at a time; the same command goes on. MUTATION_SECONDS=3600 takes longer.
MUTATION_SECONDS ?= 600
mutation: $(READY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python scripts/guard_tests.py mutation --seconds $(MUTATION_SECONDS)

test-machines: $(READY)
	$(BIN)/python scripts/two_machines.py

# That version and what it needs are installed from the package index into build/flower.
FLWR ?= 1.42
test-flower: $(READY)
	$(BIN)/python scripts/try_flower.py $(FLWR)

test-wheel: $(READY)
	$(BIN)/python scripts/try_wheel.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: attacks attacks-full lock sbom

attacks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python attacks/run_attacks.py

attacks-full: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python attacks/run_attacks.py --full

# For another version of torch give its CPU build: make lock LOCK='--wheel FILE'.
lock: $(READY)
	$(BIN)/python scripts/write_lock.py $(LOCK)

# Only what requirements.lock names, by hash; the package itself is built with what came so.
.venv-locked: requirements.lock
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$@/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation .
	$@/bin/pip check
	touch $@

# The tool has a venv of its own, so that the bill does not name it.
build/sbom-tool:
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0

sbom: $(READY) build/sbom-tool
	build/sbom-tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--validate --output-file build/sbom.json .venv
	@echo build/sbom.json

wheel: $(READY)
	$(BIN)/python -m build --outdir dist

clean:
	rm -rf .venv .venv-locked demo dist
