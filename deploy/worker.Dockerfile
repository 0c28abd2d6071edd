# The worker's half without privileges: takes calls from the queue (EXEC_REDIS), has them run by the runner beside it.
#   docker build -f deploy/worker.Dockerfile -t exec-service-worker .
# The Python that everything runs on. Another registry or a digest: --build-arg BASE=…
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
# Where packages come from; pip reads these. Offline: PIP_NO_INDEX=1 and PIP_FIND_LINKS=/a/mounted/folder
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
WORKDIR /src
COPY deploy/build-constraints.txt deploy/
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir -r deploy/build-constraints.txt
COPY deploy/constraints.txt deploy/
RUN python3 -m venv /opt/exec-service && /opt/exec-service/bin/pip install --no-cache-dir -r deploy/constraints.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY exec_wire exec_wire
COPY exec_client exec_client
COPY exec_service exec_service
COPY worker worker
# Without a compiler here the sandbox's C part is left out: only the runner needs it.
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/exec-service/bin/pip install --no-cache-dir --no-deps /dist/*.whl \
    && /opt/exec-service/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
# What it shares with its runner: a volume that is empty takes this folder's owner and mode. AppArmor's parser loads the
# runner's profile where the chart installs it on nodes.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends apparmor && rm -rf /var/lib/apt/lists/* \
    && install -d -m 2770 -g 10001 /run/exec-runner
COPY --from=build /opt/exec-service /opt/exec-service
ENV PATH=/opt/exec-service/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    EXEC_METRICS_HOST=0.0.0.0 EXEC_METRICS_PORT=9090 \
    EXEC_RUNNER_SOCKET=/run/exec-runner/runner.sock
USER 10001:10001
EXPOSE 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['EXEC_METRICS_PORT'] + '/healthz', timeout=4)"]
ENTRYPOINT ["exec-service"]
CMD ["worker"]
