"""Packing of codes: the layout, the sizes, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.reference import pack
from mxquant.formats.pack import pack_codes, unpack_codes

LENGTHS = [0, 1, 2, 3, 4, 5, 15, 16, 31, 32, 33, 40, 100]


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8)


def test_four_bits_put_the_even_index_low() -> None:
    assert pack_codes(torch.tensor([0x1, 0xA, 0x7], dtype=torch.uint8), 4).tolist() == [0xA1, 0x07]


def test_six_bits_put_four_codes_into_three_bytes() -> None:
    word = 0b000001 | 0b100010 << 6 | 0b010011 << 12 | 0b111100 << 18
    packed = pack_codes(torch.tensor([0b000001, 0b100010, 0b010011, 0b111100], dtype=torch.uint8), 6)
    assert packed.tolist() == list(word.to_bytes(3, "little"))


@pytest.mark.parametrize("bits, size", [(4, lambda n: -(-n // 2)), (6, lambda n: -(-n // 4) * 3), (8, lambda n: n)])
@pytest.mark.parametrize("length", LENGTHS)
def test_codes_come_back_from_bytes(length: int, bits: int, size: object) -> None:
    codes = random_codes(bits, 3, length)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, size(length))
    np.testing.assert_array_equal(packed.numpy(), pack(codes.numpy(), bits))
    assert torch.equal(unpack_codes(packed, bits, length), codes)


@pytest.mark.parametrize("bits", [4, 6])
def test_a_group_that_is_not_full_is_filled_with_zeros(bits: int) -> None:
    codes = torch.full((5,), 2**bits - 1, dtype=torch.uint8)
    filled = torch.nn.functional.pad(codes, (0, 3))
    assert torch.equal(pack_codes(codes, bits), pack_codes(filled, bits)[: pack_codes(codes, bits).shape[0]])


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_fewer_codes_than_the_bytes_hold(bits: int) -> None:
    codes = random_codes(bits, 2, 64)
    for length in (0, 1, 7, 63):
        assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, length), codes[:, :length])


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_any_rank(bits: int) -> None:
    codes = random_codes(bits, 2, 3, 4, 12)
    packed = pack_codes(codes, bits)
    assert packed.shape[:-1] == codes.shape[:-1]
    assert torch.equal(packed[1, 2, 3], pack_codes(codes[1, 2, 3], bits))
    assert torch.equal(unpack_codes(packed, bits, 12), codes)


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([4, 6]), codes=st.lists(st.integers(0, 63), min_size=1, max_size=40))
def test_packing_is_that_of_one_long_little_endian_number(bits: int, codes: list[int]) -> None:
    codes = [code % 2**bits for code in codes]
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    packed = pack_codes(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.tolist() == list(number.to_bytes(len(packed), "little"))
