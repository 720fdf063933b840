# The two commands: `make train` and `make test`. Both set up what they need, on a machine that has never seen us.
.PHONY: train test check lock clean

train:
	@scripts/prepare run
	@.venv/bin/trainyard train $(ARGS)

test: check
	@.venv/bin/python -m pytest $(ARGS)

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
