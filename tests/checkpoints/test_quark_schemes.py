"""Quark's static FP8 and NVFP4 activations: the specs that amd-quark 0.13 wrote for its schemes mxfp4_fp8 and nvfp4
with a small Llama, read and written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxquant import MXTensor, load_state, quantize
from mxquant.checkpoints import get_producer
from mxquant.checkpoints.quark_schemes import read_scheme, write_scheme
from mxquant.scheme import Scheme

COMMON = {
    "block_size": None,
    "enable_buffer_reuse": False,
    "max_input_numel": 4194304,
    "mx_element_dtype": None,
    "round_method": "half_even",
    "zero_point_type": "int32",
}
PER_TENSOR = COMMON | {
    "ch_axis": None,
    "dtype": "fp8_e4m3",
    "group_size": None,
    "is_dynamic": False,
    "observer_cls": "PerTensorMinMaxObserver",
    "qscheme": "per_tensor",
    "scale_calculation_mode": None,
    "scale_format": None,
    "symmetric": True,
}
FP8 = PER_TENSOR | {"is_scale_quant": False, "scale_type": None}
PER_GROUP = COMMON | {"ch_axis": -1, "observer_cls": "PerBlockMXObserver", "qscheme": "per_group", "symmetric": None}
MXFP4 = PER_GROUP | {
    "dtype": "fp4",
    "group_size": 32,
    "is_dynamic": False,
    "is_scale_quant": False,
    "scale_calculation_mode": "even",
    "scale_format": "e8m0",
    "scale_type": "float",
}
FP4_OF_16 = MXFP4 | {
    "group_size": 16,
    "scale_calculation_mode": None,
    "scale_format": "float32",
    "scale_type": "float32",
}
NVFP4 = [FP4_OF_16, PER_TENSOR | {"is_scale_quant": True, "scale_type": "float32"}]
NVFP4_INPUT = [FP4_OF_16 | {"is_dynamic": True}, NVFP4[1]]


def layer(weight: Any, inputs: Any) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}


MXFP4_FP8 = Scheme("mxfp4", "fp8_e4m3", static_activation_scale=True)
NVFP4_NVFP4 = Scheme("nvfp4", "nvfp4", static_activation_scale=True)
SCHEMES = {
    MXFP4_FP8: layer(MXFP4, FP8),
    NVFP4_NVFP4: layer(NVFP4, NVFP4_INPUT),
    Scheme("nvfp4"): layer(NVFP4, None),
    Scheme("mxfp4", "mxfp4", activation_scale_mode="even"): layer(MXFP4, MXFP4 | {"is_dynamic": True}),
}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quark_specs_round_trip(scheme: Scheme) -> None:
    """Written alike, but that the scale of FP8 activations is fp32, where Quark says nothing and takes the model's."""
    assert read_scheme("proj", SCHEMES[scheme]) == scheme
    written = write_scheme(scheme)
    if scheme.activation == "fp8_e4m3":
        assert written["input_tensors"].pop("scale_type") == "float32"
        assert written["input_tensors"] == {name: value for name, value in FP8.items() if name != "scale_type"}
        written["input_tensors"] = FP8
    assert written == SCHEMES[scheme]


@pytest.mark.parametrize(
    "weight, inputs, named",
    [
        (MXFP4, FP8 | {"is_dynamic": True}, "input_tensors"),
        (MXFP4, PER_TENSOR | {"qscheme": "per_channel", "is_dynamic": True}, "per_channel"),
        (MXFP4, NVFP4_INPUT, "nvfp4 activations with a weight in mxfp4"),
        ([FP4_OF_16, FP8], None, "weight"),
        ([FP4_OF_16 | {"group_size": 32}, NVFP4[1]], None, "weight"),
        ([MXFP4], None, "weight"),
        (FP4_OF_16, None, "weight"),
        (MXFP4, NVFP4_INPUT[:1], "input_tensors"),
        (MXFP4 | {"scale_calculation_mode": "rceil"}, None, "rceil"),
        (MXFP4 | {"ch_axis": 0}, None, "weight"),
        (MXFP4, MXFP4 | {"is_dynamic": True, "ch_axis": 1}, "input_tensors"),
        (MXFP4, MXFP4 | {"is_dynamic": True, "round_method": "floor"}, "round_method 'floor'"),
        (NVFP4, [NVFP4_INPUT[0], NVFP4[1] | {"round_method": "round"}], "round_method 'round'"),
    ],
)
def test_unsupported_quark_specs_are_refused(weight: Any, inputs: Any, named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        read_scheme("proj", layer(weight, inputs))


def write(at: Path, tensors: dict[str, Tensor], scheme: Scheme) -> None:
    config = {"quant_method": "quark", "global_quant_config": SCHEMES[scheme], "exclude": []}
    (at / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, at / "model.safetensors")


def test_bf16_static_scale_is_written_in_its_stored_dtype(tmp_path: Path) -> None:
    """Quark takes it in the model's dtype. It is computed in fp32, and comes back as it was where it is known."""
    weight = quantize(torch.randn(4, 64, dtype=torch.bfloat16), "mxfp4")
    static = torch.tensor(0.0073, dtype=torch.bfloat16)
    tensors = {"proj.weight": weight.qdata, "proj.weight_scale": weight.scale, "proj.input_scale": static}
    write(tmp_path, tensors, MXFP4_FP8)
    read = load_state(tmp_path)["proj.weight"]
    assert isinstance(read, MXTensor)
    assert read.activation == "fp8_e4m3"
    assert torch.equal(read.activation_scale, static.float())
    quark = get_producer("quark")
    encoded = quark.encode("proj.weight", read, {"proj.input_scale": static})
    assert encoded["proj.input_scale"].dtype == torch.bfloat16
    assert all(torch.equal(encoded[name], tensor) for name, tensor in tensors.items())
    # Another scale since, and none known: fp32.
    assert (
        quark.encode("proj.weight", read, {"proj.input_scale": static * 2})["proj.input_scale"].dtype == torch.float32
    )
    assert quark.encode("proj.weight", read, {})["proj.input_scale"].dtype == torch.float32


def test_nvfp4_with_a_static_scale_round_trips(tmp_path: Path) -> None:
    weight = quantize(torch.randn(4, 64, dtype=torch.bfloat16), "nvfp4")
    weight = weight.with_activation("nvfp4", "even", torch.tensor(0.01))
    encoded = get_producer("quark").encode("proj.weight", weight, {})
    dtypes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in encoded.items()}
    assert dtypes == {
        "proj.weight": (torch.uint8, (4, 32)),
        "proj.weight_scale": (torch.float8_e4m3fn, (4, 4)),
        "proj.weight_scale_2": (torch.float32, ()),
        "proj.input_scale_2": (torch.float32, ()),
    }
    write(tmp_path, encoded, NVFP4_NVFP4)
    read = load_state(tmp_path)["proj.weight"]
    assert torch.equal(read.dequantize(), weight.dequantize())
    assert torch.equal(read.activation_scale, weight.activation_scale)
    del encoded["proj.input_scale_2"]
    write(tmp_path, encoded, NVFP4_NVFP4)
    with pytest.raises(ValueError, match="input_scale_2' is missing"):
        load_state(tmp_path)
