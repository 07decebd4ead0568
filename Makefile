# Everything that a person types. Each target makes the environment that it needs, once.
PYTHON ?= python3
VENV   ?= .venv
PEER   ?= .venv-trl
SITE   ?= .venv-site
TORCH  := torch==2.13.0
# Tests are small models: many workers of one thread each beat one worker of many threads.
WORKERS ?= 2

BIN     := $(VENV)/bin
PACKAGE := $(VENV)/.package
READY   := $(VENV)/.ready

.PHONY: demo test slow check format parity bench docs site wheel clean

demo: $(PACKAGE)  ## PPO makes movie reviews positive, with models that come with the package
	$(BIN)/operant train sentiment

test: $(READY)  ## the everyday suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n $(WORKERS) --dist worksteal $(ARGS)

slow: $(READY)  ## the tests that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow -n $(WORKERS) --dist worksteal $(ARGS)

check: $(READY)  ## lint, formatting, types, docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/keywords.py
	$(BIN)/pyright
	$(BIN)/python docs/reference.py check

format: $(READY)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

parity: $(READY) $(PEER)/.ready $(PEER)-1.16/.ready  ## hold the numbers to TRL's own: PPO's to 0.11.4, GRPO's and RLOO's to 1.16.0
	OPERANT_TRL_PYTHON=$(PEER)/bin/python OPERANT_TRL_1_16_PYTHON=$(PEER)-1.16/bin/python \
	  $(BIN)/python -m pytest -q -rP tests/test_parity_trl.py

bench: $(READY) $(PEER)/.ready $(PEER)-1.12/.ready $(PEER)-1.16/.ready  ## measure: benchmarks/README.md says what and for how long
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(READY)  ## write the pages that are made from the code
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/keywords.py

# -W: a link that leads nowhere fails. -E: no part of an earlier build is left.
site: $(READY) $(SITE)/.ready  ## pages and API reference as static files that load nothing from elsewhere: build/site
	$(BIN)/python docs/reference.py
	$(SITE)/bin/sphinx-build -q -E -W --keep-going -c docs . build/site
	@echo "the site: build/site/index.html"

# In an environment of its own: neither tool belongs to the package. ARGS=--install needs the network, and some minutes.
wheel:  ## build wheel and sdist into dist/ and check both; ARGS=--install installs and starts them with each extra, too
	@test -x .venv-wheel/bin/twine || { $(PYTHON) -m venv .venv-wheel && .venv-wheel/bin/python -m pip install -q build twine; }
	.venv-wheel/bin/python -m benchmarks.wheel dist $(ARGS)

clean:  ## remove environments and caches; runs/ stays
	rm -rf $(VENV) $(PEER) $(PEER)-1.12 $(PEER)-1.16 $(SITE) .venv-wheel docs/reference build dist .pytest_cache .ruff_cache .hypothesis
	find src tests recipes benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and by its version: a range would take another build, with gigabytes of extras.
$(PACKAGE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("operant needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Making $(VENV): torch, transformers and operant; once, a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(READY): $(PACKAGE)
	@echo "Adding the tools of developers and the extras to $(VENV); once, a minute or two"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,gymnasium,vader,metrics,maths,trackers,lora,trl,migrate,label,ray,textarena,scienceworld]"
	@touch $(READY)

$(PEER)/.ready: tests/parity/requirements.txt
$(PEER)-1.12/.ready: benchmarks/peers/trl-1.12.txt
$(PEER)-1.16/.ready: benchmarks/peers/trl-1.16.txt
$(PEER)/.ready $(PEER)-1.12/.ready $(PEER)-1.16/.ready:
	@echo "Making $(@D): TRL as $< pins it, and what it needs; once, a few minutes"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q $(TORCH)
	$(@D)/bin/python -m pip install -q -r $<
	@touch $@

$(SITE)/.ready: docs/site-requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install -q -r $<
	@touch $@
