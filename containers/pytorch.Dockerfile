# GeoTrain on NVIDIA's PyTorch image, whose torch, NCCL, Transformer Engine and apex NVIDIA has built together: they are
# kept. From the repository's root:
#
#   docker build --file containers/pytorch.Dockerfile --tag geotrain .
#   docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 --volume "$PWD/runs:/opt/geotrain/runs" -it geotrain
#
# --build-arg IMAGE=… takes another release: its torch must be 2.11 or newer.
ARG IMAGE=nvcr.io/nvidia/pytorch:26.03-py3
FROM ${IMAGE}
WORKDIR /opt/geotrain
COPY . .
RUN make install SYSTEM_SITE_PACKAGES=1
ENV PATH=/opt/geotrain/.venv/bin:${PATH}
CMD ["bash"]
