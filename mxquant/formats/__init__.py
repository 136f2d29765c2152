"""The bits of every format: element formats, scales, packing and blocks. Pure torch on plain tensors."""

from mxquant.formats.block import dequantize_blocks, quantize_blocks
from mxquant.formats.scale import nvfp4_per_tensor_scale, nvfp4_row_scale
from mxquant.formats.spec import (
    ACTIVATION_FORMATS,
    ELEMENT_FORMATS,
    FORMAT_ALIASES,
    FORMATS,
    WEIGHT_FORMATS,
    ElementFormat,
    Format,
    get_format,
    resolve_scale_mode,
)

__all__ = [
    "ACTIVATION_FORMATS",
    "ELEMENT_FORMATS",
    "FORMATS",
    "FORMAT_ALIASES",
    "WEIGHT_FORMATS",
    "ElementFormat",
    "Format",
    "dequantize_blocks",
    "get_format",
    "nvfp4_per_tensor_scale",
    "nvfp4_row_scale",
    "quantize_blocks",
    "resolve_scale_mode",
]
