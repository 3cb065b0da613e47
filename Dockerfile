# This project on NVIDIA's PyTorch image, for launch/gpu_check.sh. Never built here: there is neither a GPU nor Docker.
#   docker build -t mock-scheduler . && docker run --gpus all --ipc=host --rm -v "$PWD/output:/output" mock-scheduler
#
# Known of 25.12 from its release notes (docs.nvidia.com, PyTorch release notes, rel-25-12): CUDA 13.1.0, torch
# 2.10.0a0+b4e4ee81d3 for Python 3.12 in /usr/local/lib/python3.12/dist-packages, and a pip constraints file,
# /etc/pip/constraint.txt, with the version of every package that the image was built from. It is the newest release whose
# notes could be read. TransformerEngine's installation page says that it is in every such image since 22.09; that apex is,
# older release notes say (19.06), and these were not read for it. The report of gpu_check names the versions it finds.
ARG IMAGE=nvcr.io/nvidia/pytorch:25.12-py3
FROM ${IMAGE}

WORKDIR /opt/mock-scheduler
COPY . .
# The image's torch, TransformerEngine and apex stay: all ranges of setup.py allow them. The image's own constraints hold
# every package of it to one version, which may be older than this project needs; so torch's stands alone in their place.
RUN python -c "import torch; print(f'torch=={torch.__version__}')" >/tmp/kept.txt \
    && PIP_CONSTRAINT=/tmp/kept.txt pip install --no-build-isolation -e . \
    && python -c "import torch; print(f'torch=={torch.__version__}')" | diff /tmp/kept.txt -

ENV PYTHON=python
CMD ["bash", "launch/gpu_check.sh", "--output", "/output"]
