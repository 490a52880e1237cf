"""Whether there is a GPU. Only a child may use it: no process that is forked from one with CUDA in use can use CUDA itself."""

from __future__ import annotations

import os

# Else the question itself starts CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


DEVICES = ["cpu", "cuda"] if has_cuda() else ["cpu"]
