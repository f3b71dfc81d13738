# Every target works in a fresh clone: `setup` makes .venv and installs what is missing, and takes a
# second once that is done.

SHELL := /bin/bash
VENV := .venv
RUN := scripts/in-venv.sh

# `make` on its own explains itself.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint bench doctor jar clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv, install everything, build Horovod (a few minutes the first time)
	@VENV=$(VENV) scripts/setup.sh

demo: setup ## train on handwritten digits: 2 workers on local Spark
	@$(RUN) sparkdml demo $(ARGS)

# Two processes: one has the Spark session and the tests that need it, the other takes the rest.
test: setup ## the ordinary tests; ARGS="tests/cli -k doctor" chooses
	@$(RUN) pytest -m "not slow" -n 2 --dist loadgroup $(ARGS)

test-slow: setup ## the tests that take longer, with a browser, Gradle, MPI and an MLflow server
	@VENV=$(VENV) scripts/setup-slow.sh
	@SPARKDML_MLFLOW=$(abspath $(VENV))/mlflow-server/bin/mlflow $(RUN) pytest -m slow $(ARGS)

lint: setup ## ruff check, ruff format --check, mypy, and which module may import which
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) lint-imports --no-logo
	@$(RUN) mypy

bench: setup ## sparkdml against its peers; writes a table and a plot
	@$(RUN) sparkdml bench -- $(ARGS)

doctor: setup ## is this machine ready?
	@$(RUN) sparkdml doctor $(ARGS)

jar: setup ## build and test the jar of the Training tab (needs gradle; the built one is in jars/)
	gradle --offline --no-daemon jar test

clean: ## remove .venv and everything that was built; the cached Horovod wheel stays
	rm -rf $(VENV) build dist demo-output spark-warehouse metastore_db derby.log artifacts
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
