"""Scales found by search, against both candidates tried out in float64."""

import dataclasses

import pytest
import torch
from matmul_reference import activation64
from torch import Tensor

from mxquant import MXFP4Config, NVFP4Config, explain, quantize, quantize_
from mxquant.backends import candidates
from mxquant.formats import FORMATS, dequantize_blocks, get_format, nvfp4_per_tensor_scale, quantize_blocks
from mxquant.formats.element import encode
from mxquant.formats.pack import pack_codes
from mxquant.formats.scale import e4m3_to_float, e8m0_from_amax
from mxquant.kernels import has_triton
from mxquant.reference.fake_quantize import fake_quantize
from mxquant.tensor import describe

MX = [name for name, fmt in FORMATS.items() if fmt.scale_format == "e8m0"]
SEARCHED = [(name, mode) for name, fmt in FORMATS.items() for mode in fmt.searched_scale_modes]


def samples() -> Tensor:
    """Blocks of every shape: gaussian, heavy-tailed, of few large values, sparse."""
    x = torch.randn(400, 32)
    x[100:200] = x[100:200] ** 3
    x[200:300, 3:] *= 0.2
    x[300:350, 5:] = 0
    return x * torch.exp2(torch.randint(-40, 40, (400, 1)).float())


def error64(x: Tensor, byte: Tensor, name: str, per_tensor_scale: Tensor | None) -> Tensor:
    """The squared error of each block of `x` [blocks, size] with the scale bytes `byte` [blocks, 1]."""
    fmt = get_format(name)
    if per_tensor_scale is None:
        scaled = x.double() * torch.exp2(127.0 - byte.double())
        scaled = scaled.float()
    else:
        scaled = x / (e4m3_to_float(byte) * per_tensor_scale)
    qdata = pack_codes(encode(scaled, fmt.element), fmt.element.bits)
    values = dequantize_blocks(qdata, byte, fmt, x.shape[-1], per_tensor_scale=per_tensor_scale, dtype=torch.float64)
    return (values - x.double()).square().sum(-1)


def assert_least(chosen: Tensor, first: Tensor, second: Tensor) -> None:
    """Errors: that of the choice is the lesser one's, but for the rounding of fp32 sums of 32 squares: 6 ulps."""
    assert (chosen <= torch.minimum(first, second) * (1 + 6 * 2**-23)).all()


@pytest.mark.parametrize("name", MX)
def test_mse_takes_the_better_of_two_exponents(name: str) -> None:
    x = samples()
    even = quantize_blocks(x, get_format(name), "even")[1]
    byte = quantize_blocks(x, get_format(name), "mse")[1]
    lower = even - 1
    assert ((byte == even) | (byte == lower) | ((byte == even + 1) & (name == "mxfp8_e4m3"))).all()
    errors = [error64(x, candidate, name, None) for candidate in (byte, even, lower)]
    assert_least(*errors)
    if name == "mxfp4":  # the controls: neither candidate is always the better one
        for fixed in errors[1:]:
            with pytest.raises(AssertionError):
                assert_least(fixed, *errors[1:])


@pytest.mark.parametrize("name", MX)
def test_one_exponent_more_is_never_better_but_for_e4m3(name: str) -> None:
    x = samples()
    even = quantize_blocks(x, get_format(name), "even")[1]
    is_better = error64(x, even, name, None) > error64(x, even + 1, name, None)
    if name != "mxfp8_e4m3":
        assert not is_better.any()
    else:
        assert is_better.any()
        byte = quantize_blocks(x, get_format(name), "mse")[1]
        assert (byte > even)[is_better].float().mean() > 0.9


def test_four_over_six_takes_the_better_maximum() -> None:
    x = samples()[:, :16].contiguous()
    scale = nvfp4_per_tensor_scale(x, "four_over_six")
    assert scale == x.abs().max() / torch.tensor(1536.0)
    x = x[x.abs().amax(-1) > x.abs().max() * 2.0**-10]  # where the block scales are no subnormals
    byte = quantize_blocks(x, get_format("nvfp4"), "four_over_six", per_tensor_scale=scale)[1]
    six = quantize_blocks(x, get_format("nvfp4"), "even", per_tensor_scale=scale)[1]
    assert (byte >= six).all()
    four = torch.where(byte > six, byte, encode(e4m3_to_float(six) * 1.5, FORMATS["mxfp8_e4m3"].element))
    ratio = e4m3_to_float(byte) / e4m3_to_float(six)
    is_four = (byte > six).squeeze(-1)
    assert set(is_four.tolist()) == {True, False}
    assert ((ratio == 1) | ((ratio - 1.5).abs() < 0.2)).all()  # E4M3 has 3 bits of mantissa: each rounds by 1/16
    chosen, of_six, of_four = (error64(x, candidate, "nvfp4", scale) for candidate in (byte, six, four))
    assert (chosen <= of_six * (1 + 6 * 2**-23)).all()
    assert (chosen[is_four] < of_six[is_four]).all()
    assert (of_four[~is_four] >= of_six[~is_four] * 0.8).all()  # another rounding of four: not much better
    assert chosen.sum() < of_six.sum()


@pytest.mark.parametrize("name, mode", SEARCHED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_values_give_equal_bytes(name: str, mode: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 96).to(dtype)
    a, b = quantize(x, name, scale_mode=mode), quantize(x.float(), name, scale_mode=mode)
    assert torch.equal(a.qdata, b.qdata)
    assert torch.equal(a.scale, b.scale)
    scaled = quantize(x.float() * 2.0**20, name, scale_mode=mode)
    assert torch.equal(a.qdata, scaled.qdata)


@pytest.mark.parametrize("name, mode", SEARCHED)
def test_compiled_gives_equal_bytes(name: str, mode: str) -> None:
    x = samples()
    eager = quantize(x, name, scale_mode=mode)
    compiled = torch.compile(lambda x: quantize(x, name, scale_mode=mode), fullgraph=True)(x)
    assert torch.equal(eager.qdata, compiled.qdata)
    assert torch.equal(eager.scale, compiled.scale)


@pytest.mark.parametrize("name, mode", SEARCHED)
def test_activations_have_the_values_of_the_codes(name: str, mode: str) -> None:
    fmt = get_format(name)
    x = samples().view(-1, 64)
    taken = []
    for given in (mode, "even"):
        values, outer = fake_quantize(x, fmt, given, None, torch.float32)
        taken.append(values.double() if outer is None else values.double() * outer)
    expected = activation64(x, name, mode)
    assert torch.equal(taken[0], expected)
    if name not in ("mxfp6_e3m2", "mxfp8_e5m2"):  # whose small elements gain nothing from a lower scale
        assert not torch.equal(taken[1], expected)


@pytest.mark.parametrize("name", MX)
def test_every_exponent_decodes_to_finite_values(name: str) -> None:
    fmt = get_format(name)
    exponents = torch.arange(-149, 127).float()
    x = torch.exp2(exponents)[:, None] * torch.linspace(-1, 1.74, 32)
    qdata, scale = quantize_blocks(x, fmt, "mse")
    values = dequantize_blocks(qdata, scale, fmt, 32)
    assert values.isfinite().all()
    even = e8m0_from_amax(x.abs().amax(-1).view(torch.int32), fmt.element, "even")
    assert ((even == scale[:, 0]) | (even == scale[:, 0] + 1)).all()


@pytest.mark.parametrize("name, mode", SEARCHED)
def test_zeros_and_what_is_not_finite(name: str, mode: str) -> None:
    x = torch.randn(4, 32)
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf
    result = quantize(x, name, scale_mode=mode)
    size = result.scale.shape[1]
    assert result.scale[0].tolist() == [0x38 if name == "nvfp4" else 0] * size
    assert (result.dequantize()[0] == 0).all()
    assert result.scale[1:3, 0].tolist() == [255, 255]
    assert result.dequantize()[3].isfinite().all()


def test_of_equal_errors_the_first_wins() -> None:
    """Values that both candidates hold exactly."""
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([3.5, 0.0, 0.0])
    # even: 4, error 0.25; one less: 3, error 0.25.
    assert quantize_blocks(x, get_format("mxfp4"), "mse")[1].item() == 127
    assert quantize_blocks(torch.full((1, 16), 6.0), get_format("nvfp4"), "four_over_six")[1].item() == 0x78


def test_kernels_decline_activations_in_these_modes() -> None:
    config = MXFP4Config(scale_mode="mse", activation_scale_mode="mse")
    linear = torch.nn.Linear(64, 64)
    quantize_(linear, config)
    assert explain(linear).chosen == "emulation"
    problem = dataclasses.replace(
        describe(linear.weight),  # type: ignore[arg-type]
        device=torch.device("cuda"),
        capability=(9, 0),
        dtype=torch.bfloat16,
    )
    if has_triton():
        answers = dict(candidates(problem))
        assert "scale mode mse" in str(answers["triton"])
        assert "scale mode mse" in str(answers["fp8"])
        assert answers["emulation"] is None
        plain = dataclasses.replace(problem, scheme=dataclasses.replace(problem.scheme, activation_scale_mode="even"))
        assert dict(candidates(plain))["triton"] is None


def test_a_mode_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="even, four_over_six"):
        NVFP4Config(scale_mode="mse")
    with pytest.raises(ValueError, match="even_fp4, mse"):
        MXFP4Config(activation_scale_mode="four_over_six")
