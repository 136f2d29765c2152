"""Models that transformers loads in shards, one a process: `from_pretrained(..., tp_plan="auto")`.

Each process reads and quantizes its shards alone. A shard has the bytes of the whole weight's where its borders are
block borders and no scale spans it (MX formats). What is not exact is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import nn

from mxquant.formats import get_format
from mxquant.modules.quantize_target import Target

_ELSE = "map it to None, or load the model without a plan"


def refuse_inexact_shards(model: nn.Module, targets: Mapping[str, Target]) -> None:
    """Refuse targets whose shards would not be quantized as the whole weight is.

    Args:
        model: the model to load, its sharded parameters as DTensors.
        targets: what is quantized on load, by parameter name.

    Raises:
        ValueError: a weight is sharded off its block borders, or activations are scaled by rows that are sharded.
        NotImplementedError: a sharded weight has a per-tensor scale, or is sharded in a way that has no known borders.
    """
    for name, target in targets.items():
        parameter = model.get_parameter(name)
        shape = tuple(parameter.shape)
        shards = [(dim, pieces, strided) for dim, pieces, strided in _shards_of(parameter) if pieces > 1]
        experts, fmt = target.is_experts, get_format(target.config.format)
        if experts and len(shape) == 2 and shards:
            raise NotImplementedError(f"{name} {shape} holds all experts as one matrix and is sharded; {_ELSE}")
        if fmt.per_tensor and any(not (experts and dim == -len(shape)) for dim, _, _ in shards):
            raise NotImplementedError(
                f"{name} {shape} is sharded, and {fmt.name} has a scale of the whole weight, which no process sees; "
                f'use an MX format such as "mxfp4", {_ELSE}'
            )
        blocked = [(pieces, strided) for dim, pieces, strided in shards if dim == target.k_axis]
        if blocked:
            _refuse_inexact_rows(f"{name} {shape}", shape[target.k_axis], blocked, target)


def _refuse_inexact_rows(what: str, length: int, shards: list[tuple[int, bool]], target: Target) -> None:
    """Refuse a weight whose rows, of `length`, are cut off block borders, or that multiplies rows scaled as a whole."""
    block = get_format(target.config.format).block_size
    assert block is not None, "every weight format has blocks"
    activation = target.scheme.activation
    if activation is not None and get_format(activation, activation=True).scale_format != "e8m0":
        raise ValueError(
            f"{what} is sharded along its input features, where each row of activations has one scale in {activation}; "
            f'no process sees a whole row. Use activation="mxfp8" or None, {_ELSE}'
        )
    if len(shards) > 1:
        raise NotImplementedError(f"{what} is sharded along its input features by {len(shards)} mesh axes; {_ELSE}")
    ((pieces, strided),) = shards
    piece = -(-length // pieces)
    if piece % block or (strided and length % pieces):
        raise ValueError(
            f"{what} is sharded along its {length} input features into {pieces} pieces of {piece}, which are no whole "
            f"blocks of {block}: a multiple of {block * pieces} input features works; otherwise use fewer processes, "
            + _ELSE
        )


def refuse_saved_shards(model: nn.Module, saved: Set[str]) -> None:
    """Refuse to load saved quantized weights in shards.

    Raises:
        NotImplementedError: one of the parameters `saved` is sharded.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in parameters.keys() & saved:  # a body leaves out the saved weights of its head
        if any(pieces > 1 for _, pieces, _ in _shards_of(parameters[name])):
            raise NotImplementedError(
                f"{name} was saved quantized, and saved codes are not read in shards; load the model without a plan, "
                "or quantize the unquantized checkpoint on load, by quantization_config=MXQuantConfig(...)"
            )


def _shards_of(parameter: Any) -> list[tuple[int, int, bool]]:
    """Along which axis (negative), into how many pieces, and whether strided: for each mesh axis that shards it."""
    shards = []
    for mesh_axis, placement in enumerate(getattr(parameter, "placements", ())):
        if (dim := getattr(placement, "dim", None)) is not None:
            strides = getattr(placement, "split_factor", 1)
            pieces = parameter.device_mesh.size(mesh_axis) * strides
            shards.append((dim if dim < 0 else dim - parameter.dim(), pieces, strides > 1))
    return shards
