# The package with what training takes. From the root of a clone:
#
#     docker build --file docker/train.Dockerfile --tag paco-trl .
#     docker run --rm --gpus all --ipc host --volume $HOME/.cache/huggingface:/cache --volume $PWD/runs:/runs paco-trl \
#         paco-trl grpo --config paco-flux.1-dev --output_dir /runs/paco-flux \
#         --dataset_name paco_trl/data/prompts/demo.jsonl --num_prompts_per_generation 24
#
# torch brings CUDA's libraries; the driver is the host's (NVIDIA Container Toolkit). Both directories must be writable
# for user 1000. A weekly workflow builds it on GitHub; it has not been built yet.
FROM python:3.12-slim

# A C compiler, which torch.compile and DeepSpeed call while they run
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /paco_trl
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY paco_trl paco_trl
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[deepspeed,quantization,served,tensorboard]" && useradd --create-home --uid 1000 user
COPY examples examples

USER 1000
ENV HF_HOME=/cache PYTORCH_ALLOC_CONF=expandable_segments:True
VOLUME ["/cache", "/runs"]
CMD ["paco-trl", "--help"]
