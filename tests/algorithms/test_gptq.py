"""gptq() against GPTQ written out column by column with explicit inverses in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mxquant import GPTQ, MXFP4Config, NVFP4Config
from mxquant.algorithms.gptq import Grid, gptq, rotated_hessian
from mxquant.formats import (
    FORMATS,
    WEIGHT_FORMATS,
    dequantize_blocks,
    get_format,
    nvfp4_per_tensor_scale,
    quantize_blocks,
)
from mxquant.formats.element import element_values
from mxquant.reference.hadamard import hadamard

N, K, TOKENS = 12, 96, 300


def inputs(k: int = K) -> Tensor:
    """Correlated, of uneven size."""
    return torch.randn(TOKENS, k) @ torch.randn(k, k) / k**0.5 * torch.linspace(0.5, 2, k)


def grid_of(name: str, w: Tensor, mode: str | None = None) -> Grid:
    fmt = get_format(name)
    mode = mode or fmt.default_scale_mode
    assert mode is not None
    return Grid(fmt, mode, nvfp4_per_tensor_scale(w, mode) if fmt.per_tensor else None)


def decoded(codes: tuple[Tensor, Tensor], grid: Grid, k: int = K) -> Tensor:
    return dequantize_blocks(*codes, grid.format, k, per_tensor_scale=grid.per_tensor_scale, dtype=torch.float64)


def output_error(w: Tensor, q: Tensor, x: Tensor) -> float:
    y = x.double() @ w.double().T
    return ((x.double() @ q.T - y).norm() / y.norm()).item()


def reference(w: Tensor, hessian: Tensor, grid: Grid, damping: float) -> Tensor:
    """Optimal brain quantization in the order of the columns: the inverse Hessian of those left is found anew for each.

    Values are rounded to the nearest of the element's; scales come from `quantize_blocks`.
    """
    size, w, hessian = grid.format.block_size or 0, w.double().clone(), hessian.double().clone()
    hessian += damping * hessian.diagonal().mean() * torch.eye(w.shape[1], dtype=torch.float64)
    element = grid.format.element
    values = torch.tensor(element_values(element)[: element.max_code + 1], dtype=torch.float64)
    values = torch.cat([-values, values])
    for column in range(w.shape[1]):
        if column % size == 0:
            block = w[:, column : column + size].float()
            scale = quantize_blocks(block, grid.format, grid.scale_mode, per_tensor_scale=grid.per_tensor_scale)[1]
            largest = torch.full((w.shape[0], grid.format.packed_size(1)), element.max_code, dtype=torch.uint8)
            top = dequantize_blocks(
                largest, scale, grid.format, 1, per_tensor_scale=grid.per_tensor_scale, dtype=torch.float64
            )
            unit = top / element.max_value
        nearest = (w[:, column : column + 1] / unit - values).abs().argmin(1)
        rounded = values[nearest] * unit.squeeze(1)
        inverse = torch.linalg.inv(hessian[column:, column:])
        error = (w[:, column] - rounded) / inverse[0, 0]
        w[:, column] = rounded
        w[:, column + 1 :] -= error[:, None] * inverse[0, 1:]
    return w


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_codes_equal_optimal_brain_quantization(name: str) -> None:
    w, x = torch.randn(N, K), inputs()
    grid = grid_of(name, w)
    hessian = x.T @ x
    found = decoded(gptq(w, hessian, grid, GPTQ()), grid)
    expected = reference(w, hessian, grid, 0.01)
    # A value near the middle of two codes may round the other way in fp32, after which its row goes another way.
    same = (found - expected).abs().amax(1) < 1e-5 * w.abs().max()
    assert same.sum() >= N - 2
    nearest = decoded(quantize_blocks(w, grid.format, grid.scale_mode, per_tensor_scale=grid.per_tensor_scale), grid)
    assert ((nearest - expected).abs().amax(1) > 1e-5 * w.abs().max()).all()  # the control


@pytest.mark.parametrize("settings", [GPTQ(), GPTQ(act_order=True), GPTQ(damping=0.1)])
@pytest.mark.parametrize("name, mode", [(name, None) for name in WEIGHT_FORMATS] + [("mxfp4", "mse")])
def test_outputs_are_closer_than_rounded_ones(name: str, mode: str | None, settings: GPTQ) -> None:
    w, x = torch.randn(N, K), inputs()
    grid = grid_of(name, w, mode)
    nearest = quantize_blocks(w, grid.format, grid.scale_mode, per_tensor_scale=grid.per_tensor_scale)
    codes = gptq(w, x.T @ x, grid, settings)
    assert codes[0].shape == nearest[0].shape
    assert codes[1].shape == nearest[1].shape
    # Seen: 0.4 to 0.8 of the error.
    assert output_error(w, decoded(codes, grid), x) < 0.85 * output_error(w, decoded(nearest, grid), x)


@pytest.mark.parametrize("act_order", [False, True])
def test_independent_inputs_of_equal_size_leave_nothing_to_correct(act_order: bool) -> None:
    w = torch.randn(N, K)
    grid = grid_of("mxfp4", w)
    codes = gptq(w, torch.eye(K), grid, GPTQ(act_order=act_order))
    nearest = quantize_blocks(w, grid.format, "even")
    assert torch.equal(decoded(codes, grid), decoded(nearest, grid))  # the sign of zero is not kept
    assert torch.equal(codes[1], nearest[1])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6_e2m3"])
def test_stacked_matrices_are_quantized_independently(name: str) -> None:
    fmt = get_format(name)
    matrices, hessian = [torch.randn(N, K), torch.randn(3, K) * 5], (x := inputs()).T @ x
    scales = [nvfp4_per_tensor_scale(w) for w in matrices]
    column = torch.cat([scale.expand(w.shape[0], 1) for scale, w in zip(scales, matrices)])
    together = gptq(torch.cat(matrices), hessian, Grid(fmt, "even", column if fmt.per_tensor else None), GPTQ())
    for w, scale, codes, bytes_ in zip(matrices, scales, together[0].split([N, 3]), together[1].split([N, 3])):
        alone = gptq(w, hessian, Grid(fmt, "even", scale if fmt.per_tensor else None), GPTQ())
        assert torch.equal(alone[0], codes)
        assert torch.equal(alone[1], bytes_)


def test_partial_last_block() -> None:
    w, x = torch.randn(N, 40), inputs(40)
    grid = grid_of("mxfp4", w)
    codes = gptq(w, x.T @ x, grid, GPTQ())
    assert output_error(w, decoded(codes, grid, 40), x) < 0.13


def test_inputs_that_are_always_zero() -> None:
    w, x = torch.randn(N, K), inputs()
    x[:, 5], x[:, 40] = 0, 0
    grid = grid_of("mxfp4", w)
    assert output_error(w, decoded(gptq(w, x.T @ x, grid, GPTQ()), grid), x) < 0.12
    nothing = gptq(w, torch.zeros(K, K), grid, GPTQ())
    assert torch.equal(decoded(nothing, grid), decoded(quantize_blocks(w, grid.format, "even"), grid))


def test_the_hessian_of_rotated_inputs() -> None:
    x = inputs()
    rotated = hadamard(x, 32)
    expected = rotated.T @ rotated
    found = rotated_hessian(x.T @ x, 32)
    assert (found - expected).norm() < 1e-5 * expected.norm()  # fp32 sums of 300 terms in another order
    assert (x.T @ x - expected).norm() > 0.1 * expected.norm()


def test_the_same_inputs_give_the_same_codes() -> None:
    w, x = torch.randn(N, K), inputs()
    first, second = (gptq(w, x.T @ x, grid_of("mxfp4", w), GPTQ()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


# Settings


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"damping": 0}, ValueError, "damping=0"),
        ({"damping": float("inf")}, ValueError, "damping=inf"),
        ({"damping": "1%"}, ValueError, "damping='1%'"),
        ({"act_order": 1}, TypeError, "act_order=1"),
        ({"sequential": None}, TypeError, "sequential=None"),
        ({"min_tokens": 0}, ValueError, "min_tokens=0"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GPTQ(**options)


def test_config_accepts_algorithm_names_and_settings() -> None:
    assert MXFP4Config().gptq is None
    assert MXFP4Config(algorithm="gptq").gptq == GPTQ()
    assert NVFP4Config(algorithm=GPTQ(damping=0.1)).gptq == GPTQ(damping=0.1)
    assert hash(MXFP4Config(algorithm=GPTQ()))
    with pytest.raises(ValueError, match=r"algorithm='awq' is unknown; use 'rtn', 'gptq' or a mxquant.GPTQ"):
        MXFP4Config(algorithm="awq")
    assert set(FORMATS) > set(WEIGHT_FORMATS)
