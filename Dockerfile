# CPU:  docker build -t jaxfound .
# GPU:  docker build --build-arg EXTRA=cuda13 -t jaxfound .      then: docker run --gpus all …
FROM python:3.12-slim

# One or more extras of pyproject.toml, separated by commas; empty = the library alone.
ARG EXTRA=""

WORKDIR /opt/jaxfound
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxfound jaxfound
COPY pallas_kernels pallas_kernels
RUN pip install --no-cache-dir -c constraints.txt ".${EXTRA:+[$EXTRA]}"
COPY configs configs

# Runs are written to ./runs of the mounted folder:
#   docker run --rm -v "$PWD:/workspace" jaxfound train /opt/jaxfound/configs/tiny-mla-moe.yaml
WORKDIR /workspace
ENTRYPOINT ["jaxfound"]
CMD ["--help"]
