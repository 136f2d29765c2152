"""On a GPU: a block of experts gives what it gives on a CPU, from the same bytes, whichever backend computes it."""

import copy

import pytest
import torch
from matmul_reference import FORMATS
from torch import nn

from mxquant import experts_forward, quantize_, register_experts_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 8, 256, 512, 37


class Experts(nn.Module):
    """[E, K, N] or [E, N, K], with biases, gate and up interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INTERMEDIATE) / 16)
        self.b13 = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 16)
        self.b2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN))


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

register_experts_layout(
    Experts, {"w13": -2, "w2": -1}, biases={"w13": "b13", "w2": "b2"}, up="w13", down="w2", gate_order="interleaved"
)


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert 5 gets none; ids of EXPERTS belong to another rank."""
    ids = torch.rand(tokens, EXPERTS).topk(3).indices
    return torch.where(ids == 5, EXPERTS, ids), torch.rand(tokens, 3)


@pytest.mark.parametrize("tokens", [1, TOKENS, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [None, "mxfp4", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_block_gives_what_it_gives_on_a_cpu(
    format: str, activation: str | None, dtype: torch.dtype, tokens: int
) -> None:
    """As near as rounding lets it: a value that comes between two codes may get the other one."""
    block = Experts().to(dtype).requires_grad_(False)
    there = copy.deepcopy(block)
    config = {"moe": {"weight": format, "activation": activation}}
    quantize_(block, config)
    quantize_(there, config, device="cuda")
    for name in ("w13", "w2"):
        for part in ("qdata", "scale"):
            canonical = getattr(there, name).canonical()
            assert torch.equal(getattr(canonical, part).cpu(), getattr(getattr(block, name), part))
    x, (ids, weights) = torch.randn(tokens, HIDDEN, dtype=dtype), routed(tokens)
    expected = experts_forward(block, x, ids, weights)
    y = experts_forward(there, x.cuda(), ids.cuda(), weights.cuda())
    assert y.dtype == dtype
    assert (y.cpu().float() - expected.float()).norm() < (0.02 if activation is None else 0.1) * expected.float().norm()


@hopper
@pytest.mark.parametrize("tokens", [1, 9, 100])
@pytest.mark.parametrize("activation", [None, "mxfp4"])
def test_a_captured_block_follows_its_routing(activation: str | None, tokens: int) -> None:
    """No synchronization, and the graph of one routing serves another: nothing about it was decided on the host."""
    block = Experts().to("cuda", torch.bfloat16).requires_grad_(False)
    quantize_(block, {"moe": {"weight": "mxfp4", "activation": activation}})
    x, (ids, weights) = torch.randn(tokens, HIDDEN).bfloat16().cuda(), (t.cuda() for t in routed(tokens))
    expected = experts_forward(block, x, ids, weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = experts_forward(block, x, ids, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts_forward(block, x, ids, weights)
    other = routed(tokens)[0].cuda()
    ids.copy_(other)
    graph.replay()
    assert torch.equal(captured, experts_forward(block, x, other, weights))
    assert not torch.equal(captured, expected)


@hopper
@pytest.mark.parametrize("rotation", [None, 32])
@pytest.mark.parametrize("activation", [None, "mxfp4"])
def test_the_gate_is_no_launch_of_its_own(activation: str | None, rotation: int | None) -> None:
    """But where a rotation comes between it and a prologue that does not rotate. In a graph the block is the same."""
    import triton

    block = Experts().to("cuda", torch.bfloat16).requires_grad_(False)
    quantize_(block, {"moe": {"weight": "mxfp4", "activation": activation, "rotation": rotation}})
    x, (ids, weights) = torch.randn(TOKENS, HIDDEN).bfloat16().cuda(), (t.cuda() for t in routed(TOKENS))
    expected, names = experts_forward(block, x, ids, weights), []
    hook = lambda data: names.append(data.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        y = experts_forward(block, x, ids, weights)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert torch.equal(y, expected)
    fused = activation is not None or rotation is None
    assert names.count("mxquant_gated_activation") == (0 if fused else 1)
    assert sum("rescale" in name for name in names) == 2
    compiled = torch.compile(lambda *a: experts_forward(block, *a), fullgraph=True)
    with torch.no_grad():
        y = compiled(x, ids, weights)
    # Routing and sums are torch's in a graph: the sum over experts is rounded as it likes.
    assert (y - expected).float().norm() < 5e-3 * expected.float().norm()
