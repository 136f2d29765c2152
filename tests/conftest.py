"""What every test shares: a fixed seed and one thread; `matmul_reference` beside this file asserts as the tests do."""

from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("matmul_reference")

# The shapes here are small. A second thread only waits for the first, for long where other processes want the cores.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In pytest-xdist's processes the longest file comes first, so that one has it while another runs the rest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name != "test_examples.py")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a small model in bf16."""
    from small_transformers import MODELS

    MODELS["llama"]().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    return tmp_path / "source"
