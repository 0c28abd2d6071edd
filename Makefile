# make run      set everything up and serve on 127.0.0.1:8080 (PORT=9000 to change)
# make test     set everything up and run all tests
# make lint     ruff and mypy
# make hostile  every hostile program, alone and as 8 copies beside a canary (ARGS="--tier-mask userns" for tier D)
# make bench    measure the speed beside the usual ways (root; 5 minutes; ARGS=--quick for a look)
PORT ?= 8080
BIN := .venv/bin

.PHONY: help install run test lint hostile bench clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install:
	@sh deploy/setup.sh server

run: install
	@exec $(BIN)/exec-service up --port $(PORT)

test: install-dev
	$(BIN)/pytest -q $(ARGS)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

hostile: install-dev
	@$(BIN)/python tests/hostile $(ARGS)

bench: install
	@$(BIN)/python -m loadtest.bench $(ARGS)

install-dev:
	@sh deploy/setup.sh dev

clean:
	rm -rf .venv .sandbox-packages build *.egg-info
