"""What every test shares: a fixed seed, one thread, an empty tuning cache; `matmul_reference` beside this file asserts
as the tests do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from mxquant.backends import TunableBackend

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


@pytest.fixture(autouse=True, scope="session")
def no_tuning_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was tuned on this machine does not count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXQUANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def empty_tuning_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty tuning cache of the test's own."""
    from mxquant.backends.kernel_choice import forget_selected

    monkeypatch.setenv("MXQUANT_CACHE", str(tmp_path / "cache"))
    forget_selected()
    yield
    forget_selected()


@pytest.fixture
def registry_restored() -> Iterator[None]:
    """The backends that a test registers are removed after it, if it fails too."""
    from mxquant.backends import list_backends, unregister_backend

    before = list_backends()
    yield
    for name in list_backends():
        if name not in before:
            unregister_backend(name)
    assert list_backends() == before


@pytest.fixture
def fixed_backends(registry_restored: None) -> Iterator[None]:
    """Only fp8, fp16, triton and emulation are registered: a test can expect that list, and emulation on a CPU,
    whatever backends the package has besides.
    """
    from mxquant.backends import get_backend, list_backends, register_backend, unregister_backend

    names = list_backends()
    others = [name for name in names if name not in ("fp8", "fp16", "triton", "emulation")]
    removed = [(type(get_backend(name)), names[names.index(name) + 1]) for name in others]
    for name in others:
        unregister_backend(name)
    yield
    for backend, before in reversed(removed):
        register_backend(backend, before=before)


@pytest.fixture
def forked(fixed_backends: None) -> Iterator[TunableBackend]:
    """A backend of three kernels, registered."""
    from forked_backend import Forked

    from mxquant.backends import TunableBackend, get_backend, register_backend, unregister_backend

    register_backend(Forked)
    backend = get_backend(Forked.name)
    assert isinstance(backend, TunableBackend)
    yield backend
    unregister_backend(Forked.name)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a small model in bf16."""
    from small_transformers import MODELS

    MODELS["llama"]().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    return tmp_path / "source"
