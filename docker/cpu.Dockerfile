# docker build -t pyruntime -f docker/cpu.Dockerfile .
FROM ubuntu:24.04
# The compiler stays: torch.compile wants one at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir "setuptools>=77" wheel ninja
COPY . /src
RUN pip install --no-cache-dir --no-build-isolation /src
CMD ["python", "-m", "pyruntime", "doctor"]
