# GeoTrain on a plain CUDA image: torch comes from PyPI with CUDA and NCCL of its own, pinned by constraints.txt. The
# image brings nvcc for what users add, such as Transformer Engine. From the repository's root:
#
#   docker build --file containers/cuda.Dockerfile --tag geotrain .
#   docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 --volume "$PWD/runs:/opt/geotrain/runs" -it geotrain
#
# The driver must bear CUDA 13.0: 580 or newer.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
# Ubuntu removes a version once it has a newer one, so that a build with pinned ones would fail: its release pins them.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    gcc libc6-dev make openssh-client pdsh python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/geotrain
COPY . .
RUN make install
ENV PATH=/opt/geotrain/.venv/bin:${PATH}
CMD ["bash"]
