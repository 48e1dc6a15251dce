# make demo: fine-tune a small model on text that every machine has.
# make test: the tests that take less than two seconds each; all of them: make test TEST=tests
# make drill: the tests that take minutes each; then kill runs at random instants and compare their results.
# make simulate: the code of stores, locks and leases in a simulated world, where machines fail; SIMULATE="--mutations"
# plants mistakes that it must find.
# make matrix: every engine and task type with every strategy: trains, resumes after kills, exports, predicts; renews
# docs/evidence/matrix.md.
# make ui: record the tutorial's run in a terminal; run the demo through real servers, look at it in a Chromium of the
# system, and take pictures of it for the documentation.
# make team: PostgreSQL, a bucket, Prefect and MLflow with passwords and two workers; one burns down while it trains.
# make image: build the container image with docker, podman or buildah, and run the demo in it. BASE is the base image;
# without a registry: make image BASE=debootstrap.
# make docs: build the documentation site in build/docs; a warning or a broken link is an error.
# make gpu: everything that only a GPU can show, with the Python and the torch that are there: make gpu PYTHON=python3
# make bench: measure speed against the budgets, some ten minutes, best on a machine that does nothing else.
# make sbom: a bill of materials of the environment in build/sbom.cdx.json, or of an image.
# make lock: renew constraints.txt, the locked versions and their hashes, after a change of pyproject.toml's packages.
# Each first makes an environment in .venv, once. Torch comes from the index that pip is set up for; for one without
# CUDA: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

VENV ?= .venv
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
# The versions in constraints.txt are tested with 3.11; whatever is newer comes after it.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python $(NEW_ENOUGH) 2>/dev/null && echo $$python && exit; done; echo python3)
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
INSTALL := $(PIP) --constraint constraints.txt --build-constraint constraints.txt

.PHONY: demo test drill simulate matrix gpu team image ui docs bench lint lock sbom
demo: $(VENV)/.installed
	$(VENV)/bin/finetune run deployments/demo.yaml

# With TEST, slow ones too: make test TEST="--durations=20 tests/flows"
test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder \
		$(if $(TEST),$(TEST),-m "not drill and not slow")

# make drill DRILL="--kills 100 --seed 1"
drill: $(VENV)/.installed
	$(if $(DRILL),,$(VENV)/bin/python -m pytest -q -m drill)
	$(VENV)/bin/python -m tests.drill $(DRILL)

# make simulate SIMULATE="--seed 7"
simulate: $(VENV)/.installed
	$(VENV)/bin/python -m tests.simulate $(SIMULATE)

# make matrix MATRIX="--only trainer-fsdp-2"
matrix: $(VENV)/.installed
	$(VENV)/bin/python -m tests.matrix $(MATRIX)

# make gpu PYTHON=python3 GPU="--only speed --budget-s 500". It installs nothing.
gpu:
	$(PYTHON) -m tests.gpu $(GPU)

team: $(VENV)/.installed
	$(VENV)/bin/python -m tests.team

# make image BASE=debootstrap IMAGE="--engine buildah --tag finetune:1". It installs nothing here.
image:
	$(PYTHON) -m tests.image $(if $(BASE),--base $(BASE)) $(IMAGE)

ui: $(VENV)/.installed
	$(VENV)/bin/python -m tests.ui

docs: $(VENV)/.installed
	$(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

# make bench BENCH="--only step kill"
bench: $(VENV)/.installed
	$(VENV)/bin/python -m tests.benchmarks $(BENCH)

lint: $(VENV)/.installed
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m ruff format --check
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/lint-imports

# make sbom SBOM="--image localhost/finetune --out image.cdx.json"
sbom: $(VENV)/.installed
	$(VENV)/bin/python -m tests.sbom $(SBOM)

# make lock LOCK="--upgrade-package numpy"
lock:
	$(PYTHON) -m tests.lock $(LOCK)

# The scripts of an environment hold its absolute path, kept here: a checkout that was moved gets a new one.
PLACE := $(shell cat $(VENV)/.installed 2>/dev/null)
ifneq ($(PLACE),$(CURDIR))
.PHONY: $(VENV)/.installed
FRESH := $(if $(PLACE),--clear)
endif

# The locked pip first, because older ones ignore the hashes of constraints. Then torch, named exactly: a range would let
# pip look past the build that the index offers.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) $(NEW_ENOUGH) 2>/dev/null || { \
		echo "This needs Python 3.11 or newer; '$(PYTHON)' is not. Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(FRESH) $(VENV) || { \
		echo "No environment could be made; on Debian and Ubuntu, install the package python3-venv."; exit 1; }
	@echo "Installing into $(VENV): some minutes, once."
	@sed -n '/^pip==/,/[^\\]$$/p' constraints.txt > $(VENV)/pip.txt
	$(PIP) --require-hashes --requirement $(VENV)/pip.txt
	$(INSTALL) $$(grep ^torch== constraints.txt)
	$(INSTALL) --editable '.[dev,demo]'
	@echo '$(CURDIR)' > $@
