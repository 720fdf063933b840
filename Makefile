# The two commands: `make train` and `make test`. Both set up what they need, on a machine that has never seen us.
# `make test-xla` tests the path for Trainium1 in an environment of its own (docs/xla.md).
.PHONY: train test test-xla check lock clean

train:
	@scripts/prepare run
	@.venv/bin/trainyard train $(ARGS)

test: check
	@.venv/bin/python -m pytest $(ARGS)

test-xla:
	@start=$$(scripts/xla_environment) && "$$start" -m pytest tests/xla $(ARGS)

check:
	@scripts/prepare test
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

lock:
	@scripts/prepare test
	@.venv/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[test,lint]' 'torch==2.13.0'
	@.venv/bin/python scripts/lock.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
