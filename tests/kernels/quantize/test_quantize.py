"""The quantizer kernel writes the bytes of `mxquant.formats.quantize_blocks`."""

from collections.abc import Callable

import pytest
import torch
from formats.reference import ELEMENTS
from formats.samples import everything
from torch import Tensor

from mxquant.formats import FORMATS, get_format
from mxquant.formats.block import quantize_blocks as twin
from mxquant.kernels.quantize import contiguous as cast_blocks
from mxquant.kernels.quantize.strided import FORMATS as KERNEL_FORMATS
from mxquant.kernels.quantize.strided import quantize_blocks, reject
from mxquant.reference.hadamard import hadamard

# Overflow and NaN are wanted here; NumPy, which Triton's interpreter computes with, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMATS_AND_MODES = [(name, mode) for name in KERNEL_FORMATS for mode in FORMATS[name].scale_modes]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# fp32 exponents where scales are clamped, overflow or are ordinary, and mantissas around every mode's thresholds.
EXPONENTS = [0, 1, 2, 3, 16, 17, 100, 127, 128, 142, 200, 252, 253, 254]
MANTISSAS = [m + d for m in (0x000000, 0x400000, 0x600000, 0x700000, 0x780000) for d in (-0x10000, -1, 0, 1, 0x10000)]
LENGTHS = [1, 5, 31, 33, 40, 100]


def edges() -> Tensor:
    """[n, 32] in fp32: a block of each largest magnitude, then blocks with NaN, Inf and zeros of both signs."""
    bits = torch.tensor([(e << 23) + m for e in EXPONENTS for m in MANTISSAS]).clamp(0, 0x7F7FFFFF)
    amax = bits.to(torch.int32).view(torch.float32)
    blocks = amax[:, None] * (torch.rand(len(amax), 32) * 2 - 1) * torch.exp2(-torch.randint(0, 9, (len(amax), 32)))
    blocks[:, 7], blocks[1::2, 7] = amax, -amax[1::2]
    blocks[:, 3], blocks[:, 4] = 0.0, -0.0
    special = torch.randn(6, 32)
    special[0, 5], special[1, 17], special[2, 31] = torch.nan, torch.inf, -torch.inf
    special[3], special[4] = 0.0, -0.0
    special[5] = special[5].sign() * 2.0**-149
    return torch.cat([blocks, special])


def check(x: Tensor, name: str, mode: str | None = None, *, rotation: int | None = None, **options: object) -> Tensor:
    """The codes, once they and the scales are those of the twin."""
    fmt = get_format(name)
    qdata, scale = quantize_blocks(x, fmt, mode, rotation=rotation, **options)  # type: ignore[arg-type]
    x = x if rotation is None else hadamard(x, rotation)
    host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in options.items()}
    expected_qdata, expected_scale = twin(x.cpu(), fmt, mode, **host)  # type: ignore[arg-type]
    assert qdata.dtype == scale.dtype == torch.uint8
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(qdata.cpu(), expected_qdata)
    return expected_qdata


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, mode", FORMATS_AND_MODES)
def test_every_mode_on_ties_edges_and_wide_exponents(
    name: str, mode: str, dtype: torch.dtype, device: torch.device
) -> None:
    element = ELEMENTS[FORMATS[name].element.name]
    x = torch.cat([torch.from_numpy(everything(element)), edges()])
    check(x.to(dtype).to(device), name, mode)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_without_the_instructions_of_newer_gpus(
    name: str, rotated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cast_blocks, "_instruction_set", lambda device: (8, 0))
    x = torch.cat([torch.from_numpy(everything(ELEMENTS[FORMATS[name].element.name])), edges()])
    for mode in (FORMATS[name].scale_modes[0], None):
        check(x.bfloat16().to(device), name, mode, rotation=FORMATS[name].block_size if rotated else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_rotated(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Blocks whose maximum is rotated into every place, ordinary ones, and those that hold Inf and NaN."""
    size = FORMATS[name].block_size
    x = torch.cat([edges(), torch.randn(100, 32), torch.eye(32) * 2.0**7]).to(dtype).to(device)
    for mode in (FORMATS[name].scale_modes[0], None):
        codes = check(x, name, mode, rotation=size)
    check(x[:64].t(), name, rotation=size, canonical_zero=True)
    assert not torch.equal(codes, twin(x.cpu(), FORMATS[name])[0])


def test_rotated_by_given_per_tensor_scales(device: torch.device) -> None:
    x = torch.randn(3, 4, 48).to(device)
    for value in (1.0, 0.001, 1e30):
        check(x, "nvfp4", rotation=16, per_tensor_scale=torch.tensor(value, device=device))
    check(x, "nvfp4", rotation=16, per_tensor_scale=torch.rand(3, 4, 1, device=device) * 1e-3)


def test_programs_of_many_blocks(device: torch.device) -> None:
    """The last program has blocks that are not there, and more than one is needed; an address that words cannot be
    loaded from is none for this kernel.
    """
    x = torch.randn(1061, 32).bfloat16().to(device)
    for name in KERNEL_FORMATS:
        check(x, name)
    check(x.flatten()[1 : 1 + 64 * 32].view(64, 32), "mxfp4")
    check(x.flatten()[1 : 1 + 64 * 32].view(64, 32), "mxfp4", rotation=32)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_partial_blocks_and_odd_rows(name: str, length: int, device: torch.device) -> None:
    for rows, dtype in ((1, torch.bfloat16), (7, torch.float32)):
        check(torch.randn(rows, length).to(dtype).to(device), name)


def test_tiles_along_rows_and_rows_of_many_tiles(device: torch.device) -> None:
    """What a program finds beyond a row is neither read nor written."""
    check(torch.randn(3, 1100).to(device), "mxfp4")
    check(torch.randn(130, 33).to(device), "mxfp6_e2m3")
    check(torch.randn(2, 1030).bfloat16().to(device), "nvfp4")


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: x.t(), id="transposed"),
        pytest.param(lambda x: x[:, 1:45], id="columns"),
        pytest.param(lambda x: x[1::3], id="rows"),
        pytest.param(lambda x: x[:, ::2], id="every second column"),
        pytest.param(lambda x: x[:1].expand(5, -1), id="expanded"),
        pytest.param(lambda x: x.view(7, 5, 20).movedim(0, -1), id="first axis of three"),
        pytest.param(lambda x: x.view(7, 5, 20)[:, 1:4], id="inner rows of three"),
        pytest.param(lambda x: x[0], id="a vector"),
        pytest.param(lambda x: x[:0], id="no rows"),
    ],
)
@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_any_strides(name: str, view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    check(view(torch.randn(7, 100).bfloat16().to(device)), name)


def test_a_wide_transposed_tensor(device: torch.device) -> None:
    check(torch.randn(150, 70).to(device).t(), "mxfp8_e4m3")
    check(torch.randn(96, 65).bfloat16().to(device).t(), "mxfp6_e3m2")


@pytest.mark.parametrize("name", KERNEL_FORMATS)
def test_canonical_zero(name: str, device: torch.device) -> None:
    x = edges()
    codes = check(x.to(device), name, canonical_zero=True)
    assert not torch.equal(codes, twin(x, FORMATS[name])[0])


def test_given_per_tensor_scales(device: torch.device) -> None:
    """One, one a row, and extreme ones: elements saturate, or vanish, as in the twin."""
    x = torch.randn(3, 4, 40).to(device)
    for value in (1.0, 0.001, 1e-40, 1e-30, 1e30, 3e38):
        check(x, "nvfp4", per_tensor_scale=torch.tensor(value, device=device))
    check(x, "nvfp4", per_tensor_scale=torch.rand(3, 1, 1, device=device) + 0.1)
    check(x, "nvfp4", per_tensor_scale=torch.rand(3, 4, 1, device=device) * 1e-3)
    check(torch.full((2, 32), 2.0**100, device=device), "nvfp4", per_tensor_scale=torch.tensor(1e-25, device=device))


def test_fp64_searched_scales_and_rows_of_fp8_are_declined() -> None:
    assert reject(FORMATS["mxfp4"], "even", torch.float32) is None
    assert reject(FORMATS["mxfp4"], "even", torch.float64) == (
        "has no kernel for dtype float64, only for bfloat16, float16, float32"
    )
    assert "scale mode mse" in str(reject(FORMATS["mxfp4"], "mse", torch.float32))
    assert "format fp8_e4m3" in str(reject(FORMATS["fp8_e4m3"], "even", torch.float32))


@pytest.mark.parametrize("name", [name for name in KERNEL_FORMATS if name != "nvfp4"])
def test_another_mode_is_noticed(name: str, device: torch.device) -> None:
    x = edges().to(device)
    assert not torch.equal(quantize_blocks(x, FORMATS[name], "floor")[1].cpu(), twin(x.cpu(), FORMATS[name], "ceil")[1])


def test_an_unknown_mode_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="scale mode 'up' is unknown"):
        quantize_blocks(torch.randn(1, 32).to(device), FORMATS["mxfp4"], "up")
