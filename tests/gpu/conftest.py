"""Where these tests run, and what torch wants set before CUDA starts."""

import os

import pytest
import torch

pytest.register_assert_rewrite("native_cases")

# Without it torch refuses cuBLAS under use_deterministic_algorithms; it is read once, at the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)
