"""`device_map` as transformers and accelerate have it, the disk included.

accelerate offloads to files of ordinary arrays, which cannot hold packed codes with metadata. `from_pretrained` needs
no such files: weights on the CPU are views of the checkpoint's own mapped files. The system reads their pages on use
and drops them when memory is short.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_BY_SIZE = ("auto", "balanced", "balanced_low_0", "sequential")
REMEDY = (
    "quantize the checkpoint into a folder (python -m mxquant quantize SRC DST --format ...) and load that by "
    "mxquant.from_pretrained, whose weights stay in the mapped files; or send the modules to 'cpu'"
)


def without_disk(device_map: Any, max_memory: Any, sources: Mapping[str, Any]) -> tuple[Any, Any]:
    """`device_map` and `max_memory` with the CPU, and so the mapped files, in place of the disk.

    Args:
        sources: as in `Parameters`. Merged experts on the disk are refused, since no file holds them merged.
    """
    if isinstance(device_map, str) and device_map in _BY_SIZE:
        from accelerate.utils import get_max_memory

        return device_map, get_max_memory(max_memory) | {"cpu": sys.maxsize}
    if not isinstance(device_map, Mapping):
        return device_map, max_memory
    for name, source in sorted(sources.items()):
        if source.converter is not None and _place(name, device_map) == "disk":
            raise NotImplementedError(
                f"device_map sends {name!r} to the disk, but it is merged of {len(source.names)} tensors of the files, "
                "which are not mapped as they are; send it to 'cpu', or save the model once as producer='mxquant', "
                "whose files hold it merged"
            )
    return {name: "cpu" if place == "disk" else place for name, place in device_map.items()}, max_memory


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    """The device of a parameter: that of the longest entry that is its name or a module around it; None without one."""
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, with the values of offloaded weights; ValueError if one on the meta device has none anywhere.

    NOTE: the weights of modules that accelerate offloads to the CPU are on the meta device in the model itself.
    """
    from transformers.integrations.accelerate import load_offloaded_parameter

    state: dict[str, Tensor] = model.state_dict()
    return {name: load_offloaded_parameter(model, name) if value.is_meta else value for name, value in state.items()}
