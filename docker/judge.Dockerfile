# The judge on a GPU of its own. vLLM pins other versions of what the package needs, so each has an environment. From
# the root of a clone:
#
#     docker build --file docker/judge.Dockerfile --tag paco-judge .
#     docker run --rm --gpus device=7 --ipc host --network host --volume $HOME/.cache/huggingface:/cache paco-judge
#
# It listens on 127.0.0.1:8000 of the host; options of `paco-trl serve-reward` follow the name of the image. Linted, not
# built yet.
FROM python:3.12-slim

# The version that the tests run with (tests/vllm_environment); it compiles kernels while it runs
ARG VLLM=0.32.0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --no-cache-dir "vllm==${VLLM}"

WORKDIR /paco_trl
COPY setup.cfg setup.py pyproject.toml README.md LICENSE ./
COPY paco_trl paco_trl
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[served]" && useradd --create-home --uid 1000 user

USER 1000
ENV HF_HOME=/cache
VOLUME /cache
ENTRYPOINT ["paco-trl", "serve-reward", "--vllm", "/opt/vllm/bin/vllm"]
