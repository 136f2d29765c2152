"""quantize_blocks and dequantize_blocks against the reference model: formats, modes, lengths, types, memory layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from formats.reference import ELEMENT_OF_FORMAT, ELEMENTS, MODES, dequantize_mx, pack, quantize_mx, unpack
from formats.samples import MX_FORMATS, all_scales, everything, gaussian, heavy_tailed
from mxquant.formats import FORMATS, dequantize_blocks, quantize_blocks

LENGTHS = [1, 5, 16, 31, 32, 33, 40, 100]


def assert_follows_the_definition(x: torch.Tensor, name: str, mode: str) -> None:
    """Codes and scales of x are the model's; so are the values that they decode to."""
    fmt, element = FORMATS[name], ELEMENTS[ELEMENT_OF_FORMAT[name]]
    length = x.shape[-1]
    qdata, scale = quantize_blocks(x, fmt, mode)
    codes, expected_scale = quantize_mx(x.double().numpy(), element, mode)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(unpack(qdata.numpy(), element.bits, length), codes)
    np.testing.assert_array_equal(qdata.numpy(), pack(codes, element.bits))
    with np.errstate(over="ignore"):
        values = dequantize_mx(codes, expected_scale, element).astype(np.float32)
    np.testing.assert_array_equal(dequantize_blocks(qdata, scale, fmt, length).numpy(), values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MX_FORMATS)
def test_ordinary_extreme_and_tied_blocks(name: str, mode: str) -> None:
    assert_follows_the_definition(torch.from_numpy(everything(ELEMENTS[ELEMENT_OF_FORMAT[name]])), name, mode)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", MX_FORMATS)
def test_a_partial_last_block_counts_its_own_elements_only(name: str, length: int) -> None:
    for mode in ("even", "rceil"):
        assert_follows_the_definition(torch.from_numpy(all_scales(24, length)), name, mode)
        assert_follows_the_definition(torch.from_numpy(heavy_tailed(24, length)), name, mode)


@settings(max_examples=40, deadline=None)
@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 70)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    name=st.sampled_from(MX_FORMATS),
    mode=st.sampled_from(MODES),
)
def test_any_finite_input(x: np.ndarray, name: str, mode: str) -> None:
    assert_follows_the_definition(torch.from_numpy(x.copy()), name, mode)


@pytest.mark.parametrize("name", [*MX_FORMATS, "nvfp4"])
def test_equal_values_give_equal_bytes_whatever_the_type(name: str) -> None:
    """bf16, fp16, fp32 and fp64 of the same numbers, subnormals of fp16 among them."""
    both = torch.from_numpy(np.concatenate([gaussian(16, 96), heavy_tailed(16, 96) * 64, gaussian(4, 96) * 2.0**-20]))
    both = both.half().float().bfloat16().half().float()  # held exactly by either
    for mode in FORMATS[name].scale_modes:
        reference = quantize_blocks(both, FORMATS[name], mode)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            x = both.to(dtype)
            assert torch.equal(x.float(), both)
            assert all(map(torch.equal, quantize_blocks(x, FORMATS[name], mode), reference)), (dtype, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MX_FORMATS)
def test_fp64_is_rounded_once(name: str, mode: str) -> None:
    """Values a trifle above or below a tie or a threshold of the scale, that fp32 would round onto it."""
    x = everything(ELEMENTS[ELEMENT_OF_FORMAT[name]]).astype(np.float64)
    x = x[np.abs(x).max(axis=1) < 1e38]
    for factor in (1 + 2.0**-40, 1 - 2.0**-40):
        assert_follows_the_definition(torch.from_numpy(x * factor), name, mode)
    tiny = np.array([[1e-300, -1e-300, 0.0, -0.0]])
    assert_follows_the_definition(torch.from_numpy(tiny), name, mode)


@pytest.mark.parametrize("value", [1e39, -1e300])
def test_fp64_beyond_fp32_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="fp32"):
        quantize_blocks(torch.tensor([1.0, value], dtype=torch.float64), FORMATS["mxfp4"])


@pytest.mark.parametrize("name", [*MX_FORMATS, "nvfp4"])
def test_memory_that_is_not_contiguous(name: str) -> None:
    fmt, x = FORMATS[name], torch.randn(48, 80)
    for view in (x.t(), x[:, ::2], x[::3, 5:60], x.expand(2, 48, 80), torch.randn(4, 3, 40).transpose(0, 2), x.flip(0)):
        expected = quantize_blocks(view.contiguous(), fmt)
        assert all(map(torch.equal, quantize_blocks(view, fmt), expected))
        qdata, scale = expected
        g = torch.tensor(0.25) if fmt.per_tensor else None
        values = dequantize_blocks(qdata, scale, fmt, view.shape[-1], per_tensor_scale=g)
        strided = torch.stack([qdata, qdata], -1)[..., 0], torch.stack([scale, scale], -1)[..., 0]
        assert torch.equal(dequantize_blocks(*strided, fmt, view.shape[-1], per_tensor_scale=g), values)


@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (2, 1, 3, 40), (5, 1), (1, 1)])
@pytest.mark.parametrize("name", [*MX_FORMATS, "nvfp4"])
def test_any_rank(name: str, shape: tuple[int, ...]) -> None:
    fmt, x = FORMATS[name], torch.randn(shape)
    qdata, scale = quantize_blocks(x, fmt)
    assert qdata.shape == (*shape[:-1], fmt.packed_size(shape[-1]))
    assert scale.shape == (*shape[:-1], fmt.num_blocks(shape[-1]))
    assert qdata.dtype == scale.dtype == torch.uint8
    flat = quantize_blocks(x.reshape(-1, shape[-1]), fmt)
    assert torch.equal(qdata.reshape(flat[0].shape), flat[0])
    assert torch.equal(scale.reshape(flat[1].shape), flat[1])


@pytest.mark.parametrize("name", MX_FORMATS)
def test_an_empty_batch(name: str) -> None:
    fmt = FORMATS[name]
    qdata, scale = quantize_blocks(torch.empty(0, 40), fmt)
    assert qdata.shape == (0, fmt.packed_size(40))
    assert scale.shape == (0, 2)
    assert dequantize_blocks(qdata, scale, fmt, 40).shape == (0, 40)


@pytest.mark.parametrize("shape", [(2049, 64), (2, 70_000), (70_001,), (1030, 65)])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "nvfp4"])
def test_rows_are_independent_of_how_many_there_are(name: str, shape: tuple[int, ...]) -> None:
    """Large inputs are worked on in pieces: the borders must not show."""
    fmt, x = FORMATS[name], torch.randn(shape) * torch.randn(shape).exp()
    g = torch.tensor(0.01) if fmt.per_tensor else None
    qdata, scale = quantize_blocks(x, fmt, per_tensor_scale=g)
    if len(shape) == 1:
        # Pieces of whole blocks.
        pieces = [quantize_blocks(piece, fmt, per_tensor_scale=g) for piece in x.split(9600)]
    else:
        pieces = [quantize_blocks(piece, fmt, per_tensor_scale=g) for piece in x.split(97)]
    dim = -1 if len(shape) == 1 else 0
    assert torch.equal(qdata, torch.cat([piece[0] for piece in pieces], dim))
    assert torch.equal(scale, torch.cat([piece[1] for piece in pieces], dim))


@pytest.mark.parametrize("name", [*MX_FORMATS, "nvfp4"])
def test_a_slice_off_a_block_border_decodes_with_an_offset(name: str) -> None:
    fmt, x = FORMATS[name], torch.randn(3, 100)
    g = torch.tensor(0.5) if fmt.per_tensor else None
    qdata, scale = quantize_blocks(x, fmt, per_tensor_scale=g)
    whole = dequantize_blocks(qdata, scale, fmt, 100, per_tensor_scale=g)
    for offset in (1, 7, fmt.block_size - 1):
        part = dequantize_blocks(qdata, scale, fmt, 100 - offset, block_offset=offset, per_tensor_scale=g)
        assert torch.equal(part, whole[:, offset:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", MX_FORMATS)
def test_values_are_cast_once_at_the_end(name: str, dtype: torch.dtype) -> None:
    """fp16 holds what it can: the scale alone need not fit."""
    element = ELEMENTS[ELEMENT_OF_FORMAT[name]]
    qdata, scale = quantize_blocks(torch.from_numpy(all_scales(64, 32)), FORMATS[name], "floor")
    exact = dequantize_mx(unpack(qdata.numpy(), element.bits, 32), scale.numpy(), element)
    values = dequantize_blocks(qdata, scale, FORMATS[name], 32, dtype=dtype)
    assert values.dtype == dtype
    assert torch.equal(values, torch.from_numpy(exact).to(dtype))


def test_the_default_mode_is_the_formats_own() -> None:
    x = torch.from_numpy(gaussian(64, 64))
    for name, mode in {"mxfp4": "even", "mxfp6_e2m3": "even", "mxfp6_e3m2": "even", "mxfp8_e4m3": "rceil"}.items():
        assert all(map(torch.equal, quantize_blocks(x, FORMATS[name]), quantize_blocks(x, FORMATS[name], mode)))


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'up'"):
        quantize_blocks(torch.ones(32), FORMATS["mxfp4"], "up")


def test_the_input_is_left_as_it_was() -> None:
    x = torch.from_numpy(heavy_tailed(8, 33))
    before = x.clone()
    for name in (*MX_FORMATS, "nvfp4"):
        quantize_blocks(x, FORMATS[name], canonical_zero=True)
    assert torch.equal(x, before)
    assert torch.equal(torch.signbit(x), torch.signbit(before))
