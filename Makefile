# make demo    install into .venv, make two plans, train a small model here, compare with what was predicted
# make check   format, lint, types, import contracts, file lengths: seconds
# make test    check, then every test, the real trainings included

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The first Python of 3.11 or newer; PYTHON=... chooses another for a new .venv.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

LINE_LIMIT := 420
SOURCES := profiles planner launcher tui
RELEASES := tests/launcher/trl_releases.txt
RUN_OFFLINE := HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help install demo check check-format check-lint check-mypy check-pyright check-imports check-lengths \
	format test coverage docs accuracy clean

help:
	@sed -n 's/^# //p' Makefile

install: $(VENV)/.installed

# A stamp is newer than the files it was made from; a second run installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "trlfit needs Python 3.11 or newer: install it, or name one with PYTHON=..." >&2; exit 1; }
	@echo "installing trlfit and its training stack into $(VENV) (minutes; torch is large)"
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@$(PIP) install --constraint constraints.txt --upgrade pip
	@$(PIP) install --constraint constraints.txt --editable '.[train]'
	@touch $@

# DeepSpeed, which the tests train with, comes as source; its build imports torch. Kernels are left out.
$(VENV)/.developed: $(VENV)/.installed $(RELEASES)
	@echo "installing the developer tools into $(VENV)"
	@$(PIP) install --constraint constraints.txt --group dev
	@$(PIP) install --constraint constraints.txt setuptools wheel
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install --no-build-isolation --constraint constraints.txt deepspeed
	@rm -rf $(VENV)/trl-releases
	@for release in $$(grep '^[a-z]' $(RELEASES)); do \
		$(PIP) install --no-deps --target "$(VENV)/trl-releases/$$(echo "$$release" | sed 's/==/-/')" "$$release" || exit 1; \
	done
	@touch $@

demo: $(VENV)/.installed
	@$(RUN_OFFLINE) $(BIN)/python scripts/demo.py

check: check-format check-lint check-mypy check-pyright check-imports check-lengths

check-format: $(VENV)/.developed
	$(BIN)/ruff format --check --quiet .

check-lint: $(VENV)/.developed
	$(BIN)/ruff check --quiet .

check-mypy: $(VENV)/.developed
	$(BIN)/mypy

# Without the variable it asks the network whether a newer pyright exists.
check-pyright: $(VENV)/.developed
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

check-imports: $(VENV)/.developed
	PYTHONPATH=. $(BIN)/lint-imports

check-lengths:
	@find $(SOURCES) -name '*.py' -exec wc -l {} + | awk '$$2 != "total" && $$1 > $(LINE_LIMIT) \
		{ print $$2 ": " $$1 " lines; split it, the limit is $(LINE_LIMIT)"; long = 1 } END { exit long }'

format: $(VENV)/.developed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One thread for each of the two, and none that spins while it waits: two trainings at once would crawl. Each takes
# whole files, in the order of tests/conftest.py. Bytecode is kept, whatever the shell says: hundreds of children run us.
test: check
	$(RUN_OFFLINE) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest \
		--numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 5

coverage: $(VENV)/.developed
	$(RUN_OFFLINE) $(BIN)/coverage run -m pytest -m 'not launch'
	$(BIN)/coverage report

# Pages and pictures that are made from the program itself.
docs: $(VENV)/.developed accuracy
	$(BIN)/python scripts/rules_page.py
	$(BIN)/python scripts/picture.py

# Predicted against recorded: the page, its figure and the README's figures.
accuracy: $(VENV)/.developed
	$(BIN)/python benchmarks/accuracy.py --markdown
	$(BIN)/python benchmarks/times.py --markdown
	$(BIN)/python scripts/accuracy_figure.py

clean:
	rm -rf demo-runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
