"""The comparison can fail: rounding, a scale mode, packing or a single byte that is not the producer's is seen."""

from __future__ import annotations

import numpy as np
import pytest
from formats.reference import ELEMENTS, pack, scale_bytes, unpack

from conformance.comparison import assert_same, differences
from conformance.producers import Blocks, Producer, exact, producer, to_nearest
from conformance.vectors import input_tensor, input_values, load, mxquant_bytes, recorded_codes

SUITE = "amax_mantissas.bf16"


@pytest.mark.parametrize("element", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
@pytest.mark.parametrize("mode", ["floor", "ceil", "rceil"])
def test_comparison_detects_another_scale_mode(element: str, mode: str) -> None:
    """On random blocks too: no two modes give the same bytes."""
    even = load("mx_torchao")[f"normal_s1.bf16|{element}|even|s"]
    _, scale = mxquant_bytes(input_tensor("normal_s1.bf16"), element, mode)
    assert np.count_nonzero(differences(scale, even)) >= 1
    with pytest.raises(AssertionError, match="scales"):
        assert_same(scale, even, "scales")


def test_comparison_detects_the_rounding_constant_of_another_element() -> None:
    recorded = load("mx_torchao")["normal_s1.bf16|e4m3|even|s"]
    _, scale = mxquant_bytes(input_tensor("normal_s1.bf16"), "e4m3", "even_fp4")
    assert np.count_nonzero(scale != recorded) > recorded.size // 20


@pytest.mark.parametrize("ties", ["away", "zero"])
@pytest.mark.parametrize("element", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_comparison_detects_another_rounding_of_ties(element: str, ties: str) -> None:
    blocks = Blocks(input_values(SUITE), "bf16", ELEMENTS[element], "even")
    codes, scale = Producer(exact, to_nearest(ties)).predict(blocks)
    ours, our_scale = mxquant_bytes(input_tensor(SUITE), element, "even")
    assert_same(scale, our_scale, "scales")
    with pytest.raises(AssertionError, match="codes"):
        assert_same(ours, codes, "codes")


def test_tools_disagree_with_each_other() -> None:
    """One suite through ties to even (Quark), away (triton_kernels) and toward zero (ModelOpt): three answers."""
    length = input_values("ties.bf16").shape[-1]
    quark = recorded_codes("quark", "ties.bf16|e2m1|even", "e2m1", length)
    away = recorded_codes("quark_tkref", "ties.bf16|e2m1|even", "e2m1", length)
    toward_zero = recorded_codes("modelopt", "ties.bf16|e2m1|default", "e2m1", length)
    magnitudes = [codes & 7 for codes in (quark, away, toward_zero)]
    assert np.count_nonzero(magnitudes[0] != magnitudes[1]) > 10
    assert np.count_nonzero(magnitudes[1] != magnitudes[2]) > 10


def test_comparison_detects_one_wrong_byte() -> None:
    key = "normal_s1.bf16|e2m1|even"
    recorded = recorded_codes("torchao", key, "e2m1", 256)
    wrong = recorded.copy()
    wrong[3, 77] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 3072 differ\n  at \(3, 77\)"):
        assert_same(wrong, recorded, "codes")


def test_comparison_detects_swapped_nibbles() -> None:
    codes = np.arange(16, dtype=np.uint8)[None, :]
    packed = pack(codes, 4)
    swapped = (packed >> 4 | packed << 4).astype(np.uint8)
    assert (unpack(swapped, 4, 16) != codes).all()


def test_comparison_detects_missing_rules() -> None:
    """Without the rule for its zeros, Quark's codes are not explained; without its log2, its floor scales are not."""
    x = input_values(SUITE)
    blocks = Blocks(x, "bf16", ELEMENTS["e2m1"], "even")
    recorded = recorded_codes("quark", f"{SUITE}|e2m1|even", "e2m1", x.shape[-1])
    assert_same(recorded, producer("quark", "e2m1", "even")[1].predict(blocks)[0], "codes")
    with pytest.raises(AssertionError):
        assert_same(recorded, Producer().predict(blocks)[0], "codes")
    floor = scale_bytes(Blocks(x, "bf16", ELEMENTS["e2m1"], "floor").amax, ELEMENTS["e2m1"], "floor")
    with pytest.raises(AssertionError):
        assert_same(load("mx_quark")[f"{SUITE}|e2m1|floor|s"], floor, "scales")


def test_comparison_of_values_includes_the_sign_of_zero_and_nan() -> None:
    values = np.array([0.0, -0.0, np.nan, 1.0])
    assert not differences(values, values.copy()).any()
    assert differences(values, np.array([-0.0, -0.0, np.nan, 1.0])).tolist() == [True, False, False, False]
    assert differences(values, np.array([0.0, -0.0, 0.0, 1.0])).tolist() == [False, False, True, False]
