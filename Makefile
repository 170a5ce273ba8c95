# Set-up, demo and tests on a CPU machine: needs Python 3.11, pip and make. The first target lists the others.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help setup demo demo-long ablation bench bench-gpu bench-data test test-fast test-slow check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## build .venv with everything that a CPU machine needs

$(READY): pyproject.toml $(wildcard requirements/*.txt) $(wildcard requirements/torchvision_standin/*.toml)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/hosts.txt -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps ./requirements/torchvision_standin
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	rm -rf requirements/torchvision_standin/build requirements/torchvision_standin/*.egg-info
	touch $(READY)

# The main job on a real small model: regenerate, stream, train, export, draft. About ten minutes on two quiet cores.
demo: $(READY) ## train, export and evaluate a draft of SmolLM2-135M-Instruct: ten minutes on two quiet cores
	$(BIN)/python -m specforge_dspine.demo --recipe recipes/smollm2_cpu.yaml --out runs/demo

# The same with a longer recipe: more prompts, more steps, three layers.
demo-long: $(READY) ## the same with more prompts, steps and layers: an afternoon
	$(BIN)/python -m specforge_dspine.demo --recipe recipes/smollm2_cpu_long.yaml --out runs/demo-long --prompts 600

# Seven variants with three seeds each on the same captured features, and a report: 102 minutes on two busy cores.
# The same command continues what was stopped.
ABLATION_RECIPE := recipes/smollm2_cpu_ablation.yaml
ABLATION_SETS := heldout mt-bench human-eval
ablation: runs/ablation/data/seconds.json ## compare seven variants with three seeds: 102 minutes on two busy cores
	$(BIN)/python -m specforge_dspine.ablate --recipe $(ABLATION_RECIPE) --out runs/ablation \
		--sets $(ABLATION_SETS:%=captured=runs/ablation/data/%) --max-new-tokens 64 --limit 24

runs/ablation/data/seconds.json: | $(READY)
	$(BIN)/python -m specforge_dspine.demo.prepare --recipe $(ABLATION_RECIPE) --out runs/ablation/data --prompts 400 \
		--benchmarks mt-bench human-eval --capture train $(ABLATION_SETS)

# A training step against SpecForge's own, and the objective's memory. About four minutes; keep the machine quiet.
bench: $(READY) ## time training steps and decoding rounds: four minutes on a quiet machine
	$(BIN)/python -m specforge_dspine.bench --out runs/bench/cpu.json

# The same at Qwen3-8B's sizes on one GPU, with the conformance check on it: four minutes, nothing downloaded.
# Needs no .venv, but a CUDA build of torch, triton, transformers 5.8, safetensors, orjson, requests and pydantic in
# GPU_PYTHON, and SpecForge without its own requirements: pip install --no-deps specforge==0.2.0
GPU_PYTHON ?= python3
bench-gpu: ## time Qwen3-8B's sizes on one GPU: four minutes; GPU_PYTHON names the Python
	$(GPU_PYTHON) -m specforge_dspine.bench --device cuda --size qwen3_8b --out runs/bench/gpu.json

# Rows a second of data_prep.prompts beside reading with json alone. A minute or two.
bench-data: $(READY) ## count rows a second of data_prep.prompts: two minutes
	$(BIN)/python -m data_prep.bench --output runs/bench/data.json

test: $(READY) ## all tests but the slow ones, real servers included
	$(PYTEST) tests -m "not slow"

test-fast: $(READY) ## tests without servers and without several ranks
	$(PYTEST) tests -m "not server and not ranks and not slow"

test-slow: $(READY) ## the resume matrix, runs that are killed again and again, every named mistake
	$(PYTEST) tests -m slow

check: $(READY) ## style, types, import contracts, spelling
	! grep -rnE '^(<<<<<<<|>>>>>>>) ' --include='*' --exclude-dir=.git --exclude-dir=$(VENV) --exclude-dir=runs --exclude-dir=cache .
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell -D - -D .codespell/words.txt

clean: ## remove .venv, runs and cache
	rm -rf $(VENV) runs cache
