"""The tensor subclass and its operators."""

# These fill the operator tables.
from mxquant.tensor import grouped, lifecycle, matmul, state, updates, views
from mxquant.tensor.choose import as_weight, describe, requested_backend
from mxquant.tensor.construct import quantize
from mxquant.tensor.grouped import grouped_product
from mxquant.tensor.metadata import Metadata
from mxquant.tensor.mxtensor import EmulatedMXTensor, MXTensor
from mxquant.tensor.state import flatten_state_dict, unflatten_state_dict

__all__ = [
    "EmulatedMXTensor",
    "MXTensor",
    "Metadata",
    "as_weight",
    "describe",
    "flatten_state_dict",
    "grouped_product",
    "quantize",
    "requested_backend",
    "unflatten_state_dict",
]
