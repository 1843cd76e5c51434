# docker build -t pyruntime-cuda -f docker/cuda.Dockerfile .
# torch 2.13.0 of PyPI is for CUDA 13.0, whose nvcc compiles the kernels; TORCH_CUDA_ARCH_LIST: docs/how-to/gpus.md.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG TORCH_CUDA_ARCH_LIST
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN pip install --no-cache-dir torch==2.13.0 "setuptools>=77" wheel ninja
COPY . /src
RUN pip install --no-cache-dir --no-build-isolation /src
CMD ["python", "-m", "pyruntime", "doctor"]
