"""Other projects' MXFP4 linears, each as a function that takes a bf16 weight and returns x -> y.

Not a benchmark itself: `gpu_linear.py` measures those whose package is there. Each is called as its users call it, on
the codes and scales that mxquant makes of the weight, so that all stand for the same matrix. `README.md` beside this
file says where they come from.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxquant import quantize

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Version:
    """One way to compute a linear."""

    name: str
    package: str
    """The distribution that computes it."""
    build: Callable[[Tensor], Linear]
    module: str = ""
    """What to import to see whether it is there."""
    activation_scale_mode: str | None = None
    """Of the MXFP4 that it quantizes activations to; None: it leaves them, or has a format of its own."""

    def why_absent(self) -> str | None:
        """Why it cannot be imported here, or None."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # some look for a GPU or a compiler when imported
            return described(error)
        return None


def described(error: Exception) -> str:
    """An error in one line, for a record."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def codes_and_scales(w: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 codes [N, K / 2], the even element in the low nibble, and E8M0 scale bytes [N, K / 32]."""
    quantized = quantize(w, "mxfp4")
    return quantized.qdata, quantized.scale


def triton_kernels_w4a16(w: Tensor) -> Linear:
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig, matmul_ogs
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    codes, scales = (part[None].mT for part in codes_and_scales(w))  # one expert, [1, K, N]
    value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    weight = convert_layout(wrap_torch_tensor(codes, dtype=FP4), value_layout, **value_options)
    weight_scale = convert_layout(wrap_torch_tensor(scales), scale_layout, **scale_options)
    flex = FlexCtx(rhs_data=InFlexData())
    config = PrecisionConfig(weight_scale=weight_scale, flex_ctx=flex, out_dtype=torch.bfloat16)
    return lambda x: matmul_ogs(x, weight, None, precision_config=config)


def humming(w: Tensor, input_config: dict[str, str] | None) -> Linear:
    from humming.layer import HummingLayer

    n, k = w.shape
    codes, scales = codes_and_scales(w)
    layer = HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={"quant_method": "mxfp4"},
        input_config=input_config,
        torch_dtype=torch.bfloat16,
    ).to(w.device)
    layer.load_from_tensors({"weight": codes, "weight_scale": scales})
    layer.transform()
    return layer


def humming_w4a16(w: Tensor) -> Linear:
    return humming(w, None)


def humming_w4a8(w: Tensor) -> Linear:
    """Activations in FP8 with one scale a row."""
    return humming(w, {"dtype": "float8e4m3"})


def gemlite_w4a16(w: Tensor) -> Linear:
    from gemlite.helper import A16W4_MXFP

    codes, scales = codes_and_scales(w)
    unpacked = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return A16W4_MXFP(device=str(w.device), dtype=w.dtype).from_weights(unpacked, scales.view(torch.float8_e8m0fnu))


def torchao_layer(w: Tensor) -> nn.Linear:
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta")
    # Values on the grid quantize to the same bytes in every scale mode.
    layer.weight = nn.Parameter(quantize(w, "mxfp4").dequantize(), requires_grad=False)
    config = MXDynamicActivationMXWeightConfig(
        activation_dtype=torch.float4_e2m1fn_x2,
        weight_dtype=torch.float4_e2m1fn_x2,
        kernel_preference=KernelPreference.EMULATED,
        scaling_mode=ScaleCalculationMode.FLOOR,  # EVEN does not compile
    )
    quantize_(nn.Sequential(layer), config)  # in place, submodules only
    return layer


def torchao_w4a4(w: Tensor) -> Linear:
    return torchao_layer(w)


# One graph a shape and number of rows, whichever copy of the weight comes in.
compiled_linear = torch.compile(F.linear, dynamic=False, fullgraph=True)


def torchao_w4a4_compiled(w: Tensor) -> Linear:
    weight = torchao_layer(w).weight
    return lambda x: compiled_linear(x, weight)


PEERS = (
    Version("triton_kernels W4A16", "triton_kernels", triton_kernels_w4a16, "triton_kernels.matmul_ogs"),
    Version("Humming W4A16", "humming-kernels", humming_w4a16, "humming.layer"),
    Version("Humming W4A8", "humming-kernels", humming_w4a8, "humming.layer"),
    Version("torchao W4A4", "torchao", torchao_w4a4, "torchao.prototype.mx_formats", "floor"),
    Version("torchao W4A4 compiled", "torchao", torchao_w4a4_compiled, "torchao.prototype.mx_formats", "floor"),
    Version("gemlite W4A16", "gemlite", gemlite_w4a16, "gemlite.helper"),
)
PACKAGES = tuple(dict.fromkeys(peer.package for peer in PEERS))
