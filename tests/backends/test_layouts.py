"""A backend that keeps weights in an arrangement of its own: nobody else sees it, and nothing is held twice."""

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from matmul_reference import assert_product, decode64, same_bytes
from torch import Tensor, nn

from mxquant import EmulatedMXTensor, MXTensor, flatten_state_dict, quantize, register_backend, unflatten_state_dict
from mxquant.backends import FORWARD, Backend, Layout, Operand, Problem, unregister_backend
from mxquant.formats import get_format
from mxquant.formats.block import dequantize_blocks
from mxquant.formats.spec import Format
from mxquant.tensor import as_weight


class Reversed(Layout):
    """The bytes of a matrix's codes in reverse order, in one flat row, and its scales complemented."""

    name = "reversed"

    def pack(self, qdata: Tensor, scale: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
        return qdata.flatten(-2).flip(-1), ~scale

    def unpack(self, qdata: Tensor, scale: Tensor, fmt: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return qdata.flip(-1).view(*shape[:-1], fmt.packed_size(shape[-1])), ~scale


class Mirror(Backend):
    """Reads weights in the layout above, and only weight-only MXFP4 and NVFP4 ones."""

    name = "mirror"
    layout = Reversed()
    calls = 0

    def reject(self, problem: Problem) -> str | None:
        if problem.weight not in ("mxfp4", "nvfp4"):
            return "reads four-bit weights only"
        if problem.block_offset:
            return "starts on a block border only"
        return None if problem.activation is None and problem.contraction == FORWARD else "weight-only, along K"

    def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
        Mirror.calls += 1
        fmt = get_format(problem.weight)
        shape = problem.out_features, problem.in_features
        qdata, scale = self.layout.unpack(weight.qdata, weight.scale, fmt, shape)
        w = dequantize_blocks(qdata, scale, fmt, problem.in_features, per_tensor_scale=weight.per_tensor_scale)
        y = x.float() @ w.t()
        return (y if bias is None else y + bias).to(problem.dtype)


@pytest.fixture(autouse=True)
def mirror(fixed_backends: None) -> Iterator[None]:
    register_backend(Mirror)
    Mirror.calls = 0
    yield
    unregister_backend("mirror")


@pytest.fixture(params=["mxfp4", "nvfp4"])
def canonical(request: pytest.FixtureRequest) -> MXTensor:
    return quantize(torch.randn(6, 72), request.param)


@pytest.fixture
def served(canonical: MXTensor) -> MXTensor:
    return as_weight(canonical)


def test_the_weight_is_kept_in_the_backends_layout(canonical: MXTensor, served: MXTensor) -> None:
    assert type(served) is MXTensor
    assert served.metadata.layout == "reversed"
    assert torch.equal(served.qdata, canonical.qdata.reshape(-1).flip(0))
    # Replaced, not added: the same bytes, and no other tensor hangs on it.
    assert served.nbytes == canonical.nbytes
    tensors = [value for value in vars(served).values() if isinstance(value, Tensor)]
    assert sum(t.nbytes for t in tensors) == canonical.nbytes


def test_the_backend_multiplies_with_its_own_layout(canonical: MXTensor, served: MXTensor) -> None:
    x, bias = torch.randn(3, 72), torch.randn(6)
    assert_product(F.linear(x, served, bias), x.double(), decode64(canonical), bias)
    assert Mirror.calls == 1


def test_dequantize_and_other_reads_convert_to_canonical(canonical: MXTensor, served: MXTensor) -> None:
    assert torch.equal(served.dequantize(), canonical.dequantize())
    assert (served.shape, served.stride()) == (canonical.shape, canonical.stride())
    assert torch.equal(served, canonical)


SLICES = {
    "rows": lambda w: w[1:4],
    "columns": lambda w: w[:, 32:],
    "columns off a border": lambda w: w[:, 7:50],
    "one row": lambda w: w[2],
    "t()": lambda w: w.t(),
    "view": lambda w: w.view(2, 3, 72),
    "index": lambda w: w[torch.tensor([3, 0])],
    "chunk": lambda w: w.chunk(2)[1],
    "cat": lambda w: torch.cat([w[:2], w[2:]]),
    "unsqueeze": lambda w: w.unsqueeze(0),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_and_shards_convert_to_canonical(canonical: MXTensor, served: MXTensor, name: str) -> None:
    part, expected = SLICES[name](served), SLICES[name](canonical)
    assert torch.equal(part.dequantize(), expected.dequantize())
    assert part.shape == expected.shape


def test_products_of_views(canonical: MXTensor, served: MXTensor) -> None:
    x = torch.randn(3, 72)
    assert_product(x @ served.t(), x.double(), decode64(canonical))
    assert_product(F.linear(x, served[1:4]), x.double(), decode64(canonical)[1:4])
    assert_product(F.linear(x[:, 7:50], served[:, 7:50]), x[:, 7:50].double(), decode64(canonical)[:, 7:50])
    assert_product(torch.randn(2, 6) @ served * 0, torch.zeros(2, 6).double(), decode64(canonical).mT)


def test_stacks_of_experts_and_their_parts(canonical: MXTensor) -> None:
    """The protocol hands a backend one 2-D weight in its layout, whatever it was part of."""
    stack = quantize(torch.randn(3, 6, 72), canonical.format)
    kept, w64, x = as_weight(stack), decode64(stack), torch.randn(3, 4, 72)
    assert kept.nbytes == stack.nbytes
    assert torch.equal(kept.dequantize(), stack.dequantize())
    assert_product(torch.bmm(x, kept.mT), x.double(), w64)
    assert_product(F.linear(x[1], kept[1]), x[1].double(), w64[1])
    assert Mirror.calls > 0


def test_matrices_of_a_stack_are_indexed_in_the_layout(canonical: MXTensor) -> None:
    """Converting a whole stack for one expert of it would cost more than the product."""
    stack = quantize(torch.randn(3, 6, 72), canonical.format)
    kept = as_weight(stack)
    ids = torch.tensor([2, 0, 2])
    for part, expected in ((kept[1], stack[1]), (kept[ids], stack[ids]), (kept.index_select(0, ids), stack[ids])):
        assert part.metadata.layout == "reversed"
        assert torch.equal(part.dequantize(), expected.dequantize())
    assert kept.mT[1].metadata.layout == "reversed"
    assert kept[:, 2].metadata.layout == "canonical"
    offsets = torch.tensor([1, 1, 4], dtype=torch.int32)
    x, w64 = torch.randn(4, 72), decode64(stack)
    y = torch._grouped_mm(x, kept.mT, offs=offsets)
    assert_product(y[:1], x[:1].double(), w64[0])
    assert_product(y[1:], x[1:].double(), w64[2])


def test_a_tensor_that_is_not_packed_is_multiplied(canonical: MXTensor) -> None:
    """Chosen at the call, the backend still gets its own layout."""
    x = torch.randn(3, 72)
    assert_product(F.linear(x, canonical), x.double(), decode64(canonical))
    assert_product(x @ canonical.t(), x.double(), decode64(canonical))


def test_gradients_pass_through_a_packed_weight(canonical: MXTensor, served: MXTensor) -> None:
    """The backward product contracts across the blocks, which this backend rejects: another one serves it."""
    x = torch.randn(3, 72, requires_grad=True)
    F.linear(x, served).sum().backward()
    assert x.grad is not None
    assert_product(x.grad, torch.ones(3, 6).double(), decode64(canonical).mT)


def test_files_hold_canonical_bytes(canonical: MXTensor, served: MXTensor) -> None:
    """Written on this machine, read on one without the backend."""
    tensors, metadata = flatten_state_dict({"w": served})
    expected, expected_metadata = flatten_state_dict({"w": canonical})
    assert metadata == expected_metadata
    assert all(torch.equal(tensors[n], expected[n]) for n in expected)

    file = io.BytesIO()
    torch.save({"w": served}, file)
    assert b"reversed" not in file.getvalue()
    assert b"reversed" not in pickle.dumps(served)
    unregistered = pickle.dumps(served)
    file.seek(0)
    assert same_bytes(torch.load(file, weights_only=True)["w"], canonical)
    assert same_bytes(pickle.loads(unregistered), canonical)
    assert same_bytes(unflatten_state_dict(tensors, metadata)["w"], canonical)


def test_deepcopy_and_clone_keep_the_layout(canonical: MXTensor, served: MXTensor) -> None:
    for twin in (copy.deepcopy(served), served.clone(), served.detach()):
        assert twin.metadata.layout == "reversed"
        assert torch.equal(twin.dequantize(), canonical.dequantize())


def test_copy_converts_between_layouts(canonical: MXTensor, served: MXTensor) -> None:
    other = quantize(torch.randn(6, 72), canonical.format)
    served.copy_(other)
    assert served.metadata.layout == "reversed"
    assert torch.equal(served.dequantize(), other.dequantize())
    canonical.copy_(served)
    assert canonical.metadata.layout == "canonical"
    assert torch.equal(canonical.dequantize(), other.dequantize())


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_packs(canonical: MXTensor, served: MXTensor, assign: bool) -> None:
    linear = nn.Linear(72, 6, bias=False)
    linear.weight = nn.Parameter(served, requires_grad=False)
    other = quantize(torch.randn(6, 72), canonical.format)
    linear.load_state_dict({"weight": other}, assign=assign)
    x = torch.randn(2, 72)
    assert_product(linear(x), x.double(), decode64(other))


def test_module_to_keeps_the_layout(canonical: MXTensor, served: MXTensor) -> None:
    linear = nn.Linear(72, 6, bias=False)
    linear.weight = nn.Parameter(served, requires_grad=False)
    linear.half().float().to("cpu")
    x = torch.randn(2, 72)
    assert_product(linear(x), x.double(), decode64(canonical))
    assert Mirror.calls == 1
    assert torch.equal(linear.weight.dequantize(), canonical.dequantize())


def test_to_meta_and_back(canonical: MXTensor, served: MXTensor) -> None:
    empty = torch.empty_like(served.to("meta"), device="cpu")
    empty.copy_(canonical)
    assert torch.equal(empty.dequantize(), canonical.dequantize())


def test_emulation_reads_a_weight_of_that_layout(canonical: MXTensor, served: MXTensor) -> None:
    emulated = as_weight(served, "emulation")
    assert type(emulated) is EmulatedMXTensor
    assert same_bytes(as_weight(emulated, "emulation"), canonical)
    x = torch.randn(3, 72)
    assert_product(F.linear(x, emulated), x.double(), decode64(canonical))
    assert Mirror.calls == 0


def test_a_layout_name_belongs_to_one_backend() -> None:
    cls = type("Other", (Mirror,), {"name": "other"})
    with pytest.raises(ValueError, match="reversed"):
        register_backend(cls)


def test_a_packed_weight_compiles(canonical: MXTensor, served: MXTensor) -> None:
    x = torch.randn(3, 72)
    compiled = torch.compile(F.linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, served), F.linear(x, served))
