# `make train` and `make test` set up everything they need on a machine that has never seen this project.
#   make test       lint, types and the fast tier of the tests (under ten minutes on two cores)
#   make test-all   every test, the nightly ones included
#   make test-part  one part of the nightly tests: make test-part PART=3/10
#   make test-xla   the Trainium1 path on torch_xla, in an environment of its own
#   make docs       the documentation site, into site/
.PHONY: train test test-all test-part test-xla check fast docs prepare lock clean

# Some environments forbid byte code; every one of the many processes of the tests would then compile torch again.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = .venv/bin/python -m pytest -n auto --no-loadscope-reorder

train:
	@scripts/prepare run
	@.venv/bin/trainyard train $(ARGS)

test: prepare
	@$(MAKE) --no-print-directory -j2 check fast

fast: prepare
	@$(PYTEST) $(ARGS)

test-all: prepare check
	@TRAINYARD_EXAMPLES=1 $(PYTEST) --nightly $(ARGS)

test-part: prepare
	@TRAINYARD_EXAMPLES=1 $(PYTEST) --nightly-part $(PART) $(ARGS)

test-xla:
	@start=$$(scripts/xla_environment) && "$$start" -m pytest tests/xla $(ARGS)

check: prepare
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

docs:
	@scripts/prepare docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "written: site/ (open site/index.html)"

prepare:
	@scripts/prepare test

lock: prepare
	@.venv/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[data,serve,page,test,lint]' 'torch==2.13.0'
	@.venv/bin/python scripts/lock.py
	@rm -rf .venv-docs && .venv/bin/python -m venv .venv-docs
	@.venv/bin/python scripts/lock.py docs-requirements > .venv-docs/requirements.txt
	@.venv-docs/bin/python -m pip install --quiet -r .venv-docs/requirements.txt
	@.venv-docs/bin/python scripts/lock.py docs

clean:
	rm -rf .venv .venv-docs site .mypy_cache .pytest_cache .ruff_cache
