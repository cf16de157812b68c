# make demo: everything, from nothing to answers.  make serve: the server.  make test: all tests.
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo serve ingest doctor test check bench samples install clean

demo: $(VENV)/.installed
	$(BIN)/dflash-rag demo

serve: $(VENV)/.installed
	$(BIN)/dflash-rag models pull
	$(BIN)/dflash-rag serve

ingest: $(VENV)/.installed
	$(BIN)/dflash-rag models pull
	$(BIN)/dflash-rag ingest

doctor: $(VENV)/.installed
	$(BIN)/dflash-rag doctor

test: $(VENV)/.developing
	$(BIN)/dflash-rag models pull smollm2-135m all-minilm-l6-v2
	$(BIN)/python -m pytest

check: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_samples.py --check
	$(BIN)/python -m pytest -q tests/unit/docs

bench: $(VENV)/.developing
	$(BIN)/dflash-rag models pull smollm2-135m all-minilm-l6-v2
	$(BIN)/dflash-rag bench
	$(BIN)/python tests/bench/bench_rounds.py

samples: $(VENV)/.developing
	$(BIN)/python scripts/make_samples.py

install: $(VENV)/.installed

$(VENV)/bin/python:
	@sh scripts/make_venv.sh $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# The DFlash authors' package, which tests compare with. Its own requirements are not needed.
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) var build *.egg-info
