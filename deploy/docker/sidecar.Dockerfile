# The observatory beside a vLLM, an SGLang or a remote kvwatch: no torch, about 200 MB.
#   docker build --file deploy/docker/sidecar.Dockerfile --tag kvwatch-sidecar:0.1.0 .
#   docker run --read-only --network host kvwatch-sidecar:0.1.0 sidecar --engine chat=vllm+http://127.0.0.1:8000
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
COPY deploy/docker/sidecar.lock.txt ./
RUN python -m venv /opt/kvwatch \
    && /opt/kvwatch/bin/pip install --no-cache-dir --no-compile --requirement sidecar.lock.txt
COPY pyproject.toml README.md LICENSE ./
COPY kvwatch kvwatch
# The distribution names them; without their requirements `kvwatch serve` only says how to install it.
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
    HOME=/var/cache/kvwatch
USER 10001:10001
WORKDIR /var/cache/kvwatch
VOLUME /var/cache/kvwatch
EXPOSE 9400
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvwatch"]
CMD ["sidecar", "--help"]
