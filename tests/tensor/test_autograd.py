"""Gradients through a frozen quantized weight: LoRA, prompt tuning, bias tuning."""

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import FORMATS, assert_product, decode64, quantized, quantized_linear
from torch import nn

from mxquant import quantize_
from mxquant.tensor import mxtensor

PAIRS = [*((f, None) for f in FORMATS), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "fp8_e4m3")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format, activation", PAIRS)
def test_input_gradient_is_grad_times_the_dequantized_weight(
    format: str, activation: str | None, dtype: torch.dtype
) -> None:
    """The backward product contracts across the blocks: the incoming gradient is never quantized."""
    weight = quantized(torch.randn(6, 40, dtype=dtype), format, activation)
    x = torch.randn(5, 40, dtype=dtype, requires_grad=True)
    grad = torch.randn(5, 6, dtype=dtype)
    F.linear(x, weight).backward(grad)
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert_product(x.grad, grad.double(), decode64(weight).mT)


@pytest.mark.parametrize("format, activation", PAIRS)
def test_bias_gradient_alone_and_with_the_input(format: str, activation: str | None) -> None:
    linear = quantized_linear(40, 6, format, activation, dtype=torch.float32)
    assert not linear.weight.requires_grad
    for needs_input in (False, True):
        x = torch.randn(2, 5, 40, requires_grad=needs_input)
        linear.zero_grad()
        linear(x).sum().backward()
        assert linear.bias.grad is not None
        assert linear.bias.grad.tolist() == [10.0] * 6
        assert linear.weight.grad is None
        assert (x.grad is not None) == needs_input


@pytest.mark.parametrize("format, activation", PAIRS)
def test_gradient_passes_through_mm_bmm_and_transposed_weights(format: str, activation: str | None) -> None:
    weight = quantized(torch.randn(2, 6, 40), format, activation)
    w64 = decode64(weight)
    x = torch.randn(2, 5, 40, requires_grad=True)
    torch.bmm(x, weight.mT).sum().backward()
    assert x.grad is not None
    assert_product(x.grad, torch.ones(2, 5, 6).double(), w64.mT)
    x.grad = None
    (x[0] @ weight[0].t()).sum().backward()
    assert_product(x.grad[0], torch.ones(5, 6).double(), w64[0].mT)


@pytest.mark.parametrize("format, activation", PAIRS)
def test_gradient_through_grouped_mm(format: str, activation: str | None) -> None:
    weight = quantized(torch.randn(3, 16, 48, dtype=torch.bfloat16), format, activation)
    w64 = decode64(weight)
    x = torch.randn(6, 48, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(6, 16, dtype=torch.bfloat16)
    torch._grouped_mm(x, weight.transpose(-2, -1), offs=torch.tensor([2, 2, 6], dtype=torch.int32)).backward(grad)
    assert x.grad is not None
    assert_product(x.grad[:2], grad[:2].double(), w64[0].mT)
    assert_product(x.grad[2:], grad[2:].double(), w64[2].mT)


@pytest.fixture
def fresh_warning() -> None:
    mxtensor._warn_of_frozen_weights.cache_clear()


@pytest.mark.usefixtures("fresh_warning")
def test_asking_to_train_quantized_weights_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    quantize_(model, "mxfp4")
    for _ in range(2):
        model.requires_grad_(True)
    model[0].weight.requires_grad_()
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["0.bias", "1.bias"]
    (record,) = caplog.records
    assert "dequantize_(model)" in record.message
    assert "LoRA" in record.message


@pytest.mark.usefixtures("fresh_warning")
def test_flows_that_only_copy_requires_grad_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    """Loading into a trainable model, a new parameter with torch's default, moving, freezing, and adapters."""
    model, plain = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)) for _ in range(2))
    quantize_(model, "mxfp4")
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    plain[0].weight = nn.Parameter(model[0].weight.detach())
    type(model[0].weight)(model[0].weight.detach(), requires_grad=True)  # as accelerate moves a weight
    model.to(torch.bfloat16).train().requires_grad_(False)
    adapted = LoRALinear(plain[0])
    for parameter in (*adapted.a.parameters(), *adapted.b.parameters()):
        parameter.requires_grad_(True)
    assert not caplog.records


def test_a_gradient_asked_for_by_attribute_is_that_of_the_values_and_no_optimizer_takes_it() -> None:
    linear = quantized_linear(40, 6, dtype=torch.float32)
    plain = nn.Parameter(linear.weight.dequantize())
    x = torch.randn(3, 40)
    linear.weight.requires_grad = True
    for weight in (linear.weight, plain):
        F.linear(x, weight).square().sum().backward()
    torch.testing.assert_close(linear.weight.grad, plain.grad)
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(NotImplementedError, match=r"dequantize\(\)"):
            optimizer([linear.weight], lr=0.1).step()


class LoRALinear(nn.Module):
    """The adapter as peft writes it: a frozen base and two small trained matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_lora_learns_on_a_quantized_base() -> None:
    """Two stacked adapters: the first learns only if the gradient passes through the second's quantized base."""
    model = nn.Sequential(
        LoRALinear(quantized_linear(40, 24, activation="mxfp4", dtype=torch.float32)),
        nn.ReLU(),
        LoRALinear(quantized_linear(24, 8, "nvfp4", dtype=torch.float32)),
    )
    frozen = model[0].base.weight.qdata.clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x, target = torch.randn(32, 40), torch.randn(32, 8)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert torch.equal(model[0].base.weight.qdata, frozen)


def test_a_prompt_before_a_quantized_model_gets_a_gradient() -> None:
    prompt = nn.Parameter(torch.randn(1, 3, 40))
    layer = quantized_linear(40, 40, activation="mxfp4", dtype=torch.float32)
    x = torch.cat([prompt.expand(2, -1, -1), torch.randn(2, 4, 40)], dim=1)
    layer(layer(x).relu()).square().sum().backward()
    assert prompt.grad is not None
    assert prompt.grad.isfinite().all()
    assert (prompt.grad != 0).any()


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = quantized_linear(40, 40, activation="nvfp4", dtype=torch.float32)
    x = torch.randn(3, 40, requires_grad=True)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(lambda t: layer(t), x, use_reentrant=False).square().sum().backward()
    assert expected is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_no_grad_and_inference_mode_give_the_bits_of_grad_mode(mode: type) -> None:
    layer = quantized_linear(40, 6, activation="mxfp4", dtype=torch.float32)
    x = torch.randn(3, 40)
    with mode():
        y = layer(x)
        assert not y.requires_grad
    assert torch.equal(layer(x).detach(), y)


@pytest.mark.parametrize("format", FORMATS)
def test_a_view_taken_in_inference_mode_of_an_ordinary_weight_is_usable_outside(format: str) -> None:
    weight = quantized(torch.randn(6, 72), format, format)
    plain, x = weight.dequantize(), torch.randn(3, 72)
    expected = F.linear(x, weight)
    with torch.inference_mode():
        for view in (lambda w: w.t(), lambda w: w[1:3], lambda w: w[:, 32:], lambda w: w[2], lambda w: w.chunk(3)[1]):
            assert torch.equal(view(weight).dequantize(), view(plain))
        assert torch.equal(weight.view(2, 3, 72)[1].dequantize(), plain.view(2, 3, 72)[1])
        assert torch.equal(weight.unsqueeze(0).expand(2, -1, -1).dequantize(), plain.expand(2, 6, 72))
        assert torch.equal(x @ weight.t(), expected)
        assert torch.equal(weight.clone().dequantize(), plain)
        assert torch.equal(weight.half().dequantize(), plain.half())
        assert torch.equal(F.embedding(torch.tensor([3]), weight), plain[[3]])


def test_quantizing_in_inference_mode_gives_the_same_bytes() -> None:
    with torch.inference_mode():
        layer = quantized_linear(40, 6, activation="mxfp4", dtype=torch.float32)
        inside = layer(torch.ones(2, 40))
        assert layer.weight[1:3].dequantize().shape == (2, 40)
    assert inside.shape == (2, 6)


def test_autocast_takes_float32_inputs_to_bfloat16() -> None:
    """Under autocast a linear answers in bfloat16, computed from the input rounded to bfloat16, as nn.Linear does."""
    layer = quantized_linear(40, 6, activation="mxfp4", dtype=torch.float32)
    x = torch.randn(3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.linear(x.bfloat16(), layer.weight, layer.bias.bfloat16()))


def test_autocast_applies_to_mm_and_bmm() -> None:
    weight = quantized(torch.randn(2, 6, 40), "mxfp4", "mxfp4")
    x = torch.randn(2, 3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = torch.bmm(x, weight.mT), x[0] @ weight[0].t(), torch.addmm(torch.ones(6), x[0], weight[0].t())
    plain = torch.bmm(x.bfloat16(), weight.mT)
    assert [y.dtype for y in results] == [torch.bfloat16] * 3
    assert torch.equal(results[0], plain)
    assert torch.equal(results[1], plain[0])


def test_autocast_keeps_the_gradient() -> None:
    layer = quantized_linear(40, 6, dtype=torch.float32)
    x = torch.randn(3, 40, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert layer.bias.grad.dtype == torch.float32
