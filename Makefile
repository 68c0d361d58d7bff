# kvtier: `make` alone prints what there is. Everything runs in .venv, which `make setup` makes.

# PYTHON       the interpreter for a new .venv (3.11 or newer); found by itself when empty
# TORCH_INDEX  URL of a package index with the torch build you want (CPU or a CUDA version);
#              empty: pip's own configuration decides
# TORCH        the torch requirement; pinned, because every release brings other CUDA libraries
PYTHON ?=
TORCH_INDEX ?=
TORCH ?= torch==2.13.0
SEED ?=
MODES ?=
UPGRADE ?=

VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
export PYTHON TORCH_INDEX TORCH VENV VLLM_VENV

# What `make test` leaves to other gates.
OTHER_GATES := torture or vllm or gpu or cxl or systemd

.DEFAULT_GOAL := help
.PHONY: help setup check test demo torture sim bench bench-paging bench-rivals test-vllm test-vllm-versions test-vllm-033 test-cxl test-systemd gpu-check lock audit proto wheel clean

help: ## Print this.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with kvtier, the reference engine and the tools; cheap the second time.
	@bash scripts/setup.sh

check: setup ## Lint, types, tidy and unit tests: up to a minute, a minute more the first time.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not slow and not ($(OTHER_GATES))" tests/tidy tests/unit
	@$(BIN)/python -m benchmarks.gpu.verified

test: setup ## Every test that needs no GPU and no vLLM, in short form: up to 10 minutes on 2 cores.
	@bash scripts/test.sh "not ($(OTHER_GATES))"

demo: setup ## Two engines, one daemon: the second answers with the first one's KV.
	$(BIN)/python -m kvtier.demo

torture: setup ## The full forms of crash, fault, soak and fuzz runs; resumable.
	$(BIN)/python scripts/torture.py

sim: setup ## Simulation on a fresh seed, or on SEED=n to replay one.
	@seed="$(SEED)"; seed="$${seed:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"; \
	echo "make sim SEED=$$seed"; \
	KVTIER_SIM_SEED=$$seed PYTHONHASHSEED=0 $(BIN)/python -m pytest -q tests/sim

bench: setup ## The benchmarks; writes benchmarks/results and docs/benchmarks.md.
	$(BIN)/kvtier bench match --tokens 131072 --block-tokens 16 --resident 1000000 --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/match.json
	$(BIN)/kvtier bench transfer --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/transfer.json
	$(BIN)/kvtier bench daemon --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/daemon.json
	$(BIN)/kvtier bench churn --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/churn.json
	$(BIN)/kvtier bench policy --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/policy.json
	$(BIN)/kvtier bench nvme --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/nvme.json
	$(BIN)/kvtier bench recovery --slots 1000000 --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/recovery.json
	$(BIN)/kvtier bench restart --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/restart.json
	$(BIN)/kvtier bench tiers --path . --rounds 61 --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/tiers.json
	$(BIN)/python -m benchmarks.engine_prefill > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/engine_prefill.json
	$(BIN)/python -m benchmarks.document

bench-paging: setup ## What paging, sharing and batching save, in virtual time: up to five minutes.
	$(BIN)/python -m benchmarks.paging --json > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/paging.json
	$(BIN)/python -m benchmarks.document

bench-rivals: setup ## kvtier beside LMCache and Mooncake, in environments of their own: five minutes, and 1.9 GB.
	@bash scripts/setup_rivals.sh
	$(BIN)/python -m benchmarks.rivals > $(VENV)/result.json && mv $(VENV)/result.json benchmarks/results/rivals.json
	$(BIN)/python -m benchmarks.document

test-vllm: ## Tests with real vLLM on CPU, in an environment of its own: up to 16 minutes.
	@bash scripts/setup_vllm.sh
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

test-cxl: setup ## CXL memory, in a virtual machine made here (Debian, root): up to five minutes.
	$(BIN)/python scripts/cxl_vm.py $(MODES)

test-systemd: setup ## The units under a real systemd, in a container (Debian, root): up to two minutes.
	@bash scripts/test_systemd.sh

lock: ## Pin the daemon's dependencies by hash in deploy/requirements.lock; UPGRADE=1 takes newer ones.
	@UPGRADE=$(UPGRADE) bash scripts/lock.sh

audit: ## What is known against the pinned dependencies; a bill of materials in dist/.
	@bash scripts/audit.sh

test-vllm-versions: ## The same on older versions of vLLM: VERSIONS="0.28.0 0.31.0", TESTS=tests/vllm.
	@bash scripts/setup_vllm.sh
	@VERSIONS="$(VERSIONS)" TESTS="$(TESTS)" bash scripts/test_vllm_versions.sh

test-vllm-033: ## What needs no engine on vLLM 0.33, and vLLM's own connector tests: up to 15 minutes.
	@bash scripts/setup_vllm.sh
	@TESTS="$(TESTS)" bash scripts/test_vllm_033.sh

gpu-check: ## The GPU path on a GPU, which writes kernels/VERIFIED.json: at most ten minutes.
	@$(or $(PYTHON),$(wildcard $(BIN)/python),python3) scripts/gpu_check.py

proto: ## Generate kvtier/v1/kvtier_pb2* from proto/.
	@bash scripts/proto.sh

wheel: setup ## Build the wheel into dist/.
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .
	@ls -l dist

clean: ## Remove caches and build outputs; .venv stays.
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv-proto
	find kvtier tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
