# make run      set everything up and serve on 127.0.0.1:8080 (PORT=9000 to change; PYTHON=fastest for a quarter less CPU time per call)
# make test     set everything up and run all tests, the trainer's too
# make test-service  the same without the trainer, and without torch
# make test-latest  all tests with the newest version of every package, in a copy of this folder (.venvs/latest)
# make train-demo    SFT and RL of a tiny model on this CPU, in minutes, with a report
# make test-integrations  published clients of other services, each in an environment of its own, against this one; adapters for trainers
# make test-engines  the trainer with a real vLLM on the CPU and a real pretrained model (2.4 GB in .venvs/engines; 15 minutes)
# make rehearsal  the GPU node's layout on the CPU: two vLLM, two FSDP2 ranks, three stages, an engine and a rank killed (15 minutes)
# make test-deploy  build the images, start them, run programs through them, also from the chart (root; Debian; 10 minutes)
# make test-upgrade  the previous commit's gateway with this worker and the reverse, under load; its chart values (BASE=COMMIT)
# make test-vm  isolation under another kernel, in QEMU (root; Debian; MACHINE=debian-6.1, newest, no-landlock, no-userns or delegated; CMD="..." for another command)
# make wheels   build the wheels of exec-client, exec-service and grpo-roc into dist/
# make release  the wheels with checksums, and the images by docker or podman (REGISTRY=registry.example/rl)
# make support  docs/support.md from the records of test runs (EXEC_SUPPORT_RECORD=docs/support make test)
# make lint     ruff, mypy, pylint for duplicate code, and spelling and style of the prose
# make hostile  every hostile program, alone and as 8 copies beside a canary (ARGS="--tier-mask userns" for tier D, --cells as cells of sessions)
# make fuzz     anything in every field of every route, gRPC method and queue message (EXAMPLES=200 of each; minutes)
# make proto    compile exec_wire/proto/exec.proto (after a change to it)
# make screenshots  the pictures of docs/images, of a service that runs (URL=http://127.0.0.1:8080)
# make dashboards  the pictures of the Grafana dashboards, drawn from a real Prometheus under load, and of a trace in Phoenix (2 minutes)
# make bench    speed of the service beside a fresh interpreter and a fresh nsjail per call (root; 5 minutes; ARGS=--quick)
# make bench-paired  CPU time per call of this tree and of another commit (root; BASE=COMMIT; 10 minutes)
# make compare  speed of a code-judge or SandboxFusion service beside ours (root; TARGET=URL PROTOCOL=code-judge or sandboxfusion)
# make bench-scheduler  the scheduler's policies on two real vLLM servers with small KV caches (needs two quiet cores)
# make bench-path  CPU time per call in gateway, Redis and worker, without programs (1 minute)
# make chaos    kill, stop and cut off every part of a cluster under load; nothing may be lost (root; 5 minutes)
# make load     users by locust, against URL or a service of its own (WEB=1 for its web page; USERS, TIME, SHAPE, MIX)
# make burst    N calls in flight at once over HTTP and gRPC, without programs and in sandboxes (N=45000: 15 minutes)
# make plan     how many workers, gateways and Redis servers a load needs (ARGS="--calls-per-s 1500 --p99-ms 200")
# make soak     30 minutes of faults at 80 % load: nothing lost, memory and p99 flat (root; MINUTES=2 to try)
PORT ?= 8080
URL ?= http://127.0.0.1:8080
N ?= 45000
MINUTES ?= 30
BIN := .venv/bin

.PHONY: help install run test test-integrations lint hostile proto screenshots bench bench-path chaos burst clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install:
	@sh deploy/setup.sh server

run: install
	@exec $(BIN)/exec-service up --port $(PORT)

test: install-all tools
	@BIN=$(BIN) sh deploy/test.sh $(ARGS)

.PHONY: test-latest
test-latest:
	@rm -rf .venvs/latest && mkdir -p .venvs/latest
	@git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t .venvs/latest
	@cd .venvs/latest && PINS=newest sh deploy/setup.sh dev,trainer
	@cd .venvs/latest && sh deploy/test-tools.sh && sh deploy/test.sh $(ARGS)

.PHONY: test-service train-demo test-integrations-trainers install-all
test-service: install-dev tools
	@BIN=$(BIN) TRAINER=no sh deploy/test.sh $(ARGS)

train-demo: install-all
	$(BIN)/python -m grpo_roc demo $(ARGS)

test-integrations: test-integrations-trainers

test-integrations-trainers: install-all
	$(BIN)/python tests/trainer_integrations/run.py

test-integrations: install-dev
	@sh tests/integrations/install.sh .integrations
	EXEC_INTEGRATIONS=$(CURDIR)/.integrations $(BIN)/pytest -q tests/integrations $(ARGS)

.PHONY: test-engines
test-engines: install-all
	@sh tests/engines/install.sh
	EXEC_ENGINES=.venvs/engines $(BIN)/pytest -v -s tests/engines $(ARGS)

.PHONY: bench-scheduler
bench-scheduler: install-all
	@sh tests/engines/install.sh
	EXEC_ENGINES=.venvs/engines PYTHONPATH=. $(BIN)/python tests/engines/bench_scheduler.py --out runs/scheduler.jsonl $(ARGS)
	PYTHONPATH=. $(BIN)/python tests/engines/scheduler_page.py runs/scheduler.jsonl

.PHONY: rehearsal
rehearsal: install-all
	@sh tests/engines/install.sh
	@EXEC_ENGINES=.venvs/engines PYTHONPATH=.:tests:tests/service:tests/worker:tests/trainer:tests/engines $(BIN)/python tests/engines/rehearsal.py

.PHONY: test-deploy
test-deploy: install-dev
	EXEC_TEST_DEPLOY=1 CI=true $(BIN)/pytest -v tests/deploy $(ARGS)

.PHONY: test-upgrade
test-upgrade: install-dev
	@sh deploy/tools.sh
	BASE=$(BASE) $(BIN)/pytest -v --slow tests/cluster/test_upgrade.py $(ARGS)

.PHONY: test-vm
test-vm: install-dev
	@MACHINE=$(MACHINE) sh tests/vm/run.sh $(CMD)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pylint --persistent=n exec_wire exec_client exec_service worker loadtest grpo_roc
	$(BIN)/python deploy/prose.py

hostile: install-dev
	@$(BIN)/python tests/hostile $(ARGS)

.PHONY: fuzz
fuzz: install-dev
	EXEC_FUZZ=$(or $(EXAMPLES),200) $(BIN)/pytest -q --slow tests/gateway/test_gateway_fuzz.py $(ARGS)

.PHONY: wheels
wheels: install
	@$(BIN)/python deploy/wheels.py dist

.PHONY: release support
release: install
	@REGISTRY=$(REGISTRY) BIN=$(BIN) sh deploy/release.sh

support:
	@python3 deploy/support.py

proto: install-dev
	$(BIN)/python -m grpc_tools.protoc -I exec_wire/proto --descriptor_set_out=exec_wire/proto/exec.binpb exec_wire/proto/exec.proto

screenshots: install-dev tools
	@$(BIN)/python tests/web/screenshots.py $(URL)

.PHONY: dashboards
dashboards: install-all tools
	@PYTHONPATH=.:tests:tests/service:tests/web:tests/worker $(BIN)/python tests/observe/draw_dashboards.py
	@sh tests/integrations/install.sh .integrations phoenix
	TRACE_PICTURE=$(CURDIR)/docs/images/trace.png EXEC_INTEGRATIONS=$(CURDIR)/.integrations $(BIN)/pytest -q tests/integrations/test_traces.py

bench: install
	@$(BIN)/python -m loadtest.bench $(ARGS)

.PHONY: bench-paired
bench-paired: install
	@$(BIN)/python -m loadtest.bench.paired --base $(BASE) $(ARGS)

.PHONY: compare
compare: install-dev
	@$(BIN)/python -m loadtest.bench --arms spawn,nsjail,http --mix rollout --calls 40 --repeats 3 \
	    $(if $(TARGET),--target $(TARGET)) $(if $(PROTOCOL),--protocol $(PROTOCOL)) $(ARGS)

bench-path: install-dev
	@$(BIN)/python -m loadtest.bench.path $(ARGS)

chaos: install-dev
	@$(BIN)/python -m loadtest.chaos $(ARGS)

.PHONY: load
load: install-dev
	@$(BIN)/python -m loadtest.load $(if $(filter command line environment,$(origin URL)),--url $(URL)) $(if $(WEB),--web) \
	    $(if $(USERS),--users $(USERS)) $(if $(TIME),--time $(TIME)) $(if $(SHAPE),--shape $(SHAPE)) $(if $(MIX),--mix $(MIX)) $(ARGS)

burst: install-dev
	@$(BIN)/python -m loadtest.load.burst --sizes $(N) $(ARGS)

.PHONY: plan soak
plan: install-dev
	@$(BIN)/python -m loadtest.planner $(ARGS)

soak: install-dev
	@$(BIN)/python -m loadtest.chaos.soak --minutes $(MINUTES) $(ARGS)

install-dev:
	@sh deploy/setup.sh dev

install-all:
	@sh deploy/setup.sh dev,trainer

.PHONY: tools install-dev
tools:
	@sh deploy/test-tools.sh

clean:
	rm -rf .venv .integrations .venvs .tools .sandbox-packages exec_service/web/built build *.egg-info
