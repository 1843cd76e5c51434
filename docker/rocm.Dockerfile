# docker build -t pyruntime-rocm -f docker/rocm.Dockerfile .
# AMD's image brings a torch that is on PATH, and the hipcc of its ROCm; PYTORCH_ROCM_ARCH: docs/how-to/gpus.md.
FROM rocm/pytorch:rocm7.14_ubuntu24.04_py3.12_pytorch_release_2.11.0
ARG PYTORCH_ROCM_ARCH
RUN pip install --no-cache-dir "setuptools>=77" wheel ninja
COPY . /src
RUN pip install --no-cache-dir --no-build-isolation /src
CMD ["python", "-m", "pyruntime", "doctor"]
