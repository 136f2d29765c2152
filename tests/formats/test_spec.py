"""Formats by name: what each is made of, what it takes up, and what is refused."""

from __future__ import annotations

import pytest

from formats.reference import ELEMENT_OF_FORMAT, ELEMENTS, FORMAT_OF_ELEMENT, MODES
from mxquant.formats import ELEMENT_FORMATS, FORMATS, get_format, resolve_scale_mode

WEIGHT_FORMATS = [*ELEMENT_OF_FORMAT, "nvfp4"]
ACTIVATION_ONLY = ["fp8_e4m3", "fp8_e5m2"]


def test_every_format_and_element_format_has_a_twin() -> None:
    """The exhaustive tests here compare each with its twin in `reference.py`: what has none would be compared with
    nothing.
    """
    assert set(ELEMENT_FORMATS) == set(ELEMENTS) == set(FORMAT_OF_ELEMENT)
    assert set(FORMATS) == {*WEIGHT_FORMATS, *ACTIVATION_ONLY}
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        assert get_format(name, activation=True) is fmt


@pytest.mark.parametrize("name", ELEMENTS)
def test_element_formats_are_those_of_the_specification(name: str) -> None:
    element, reference = ELEMENT_FORMATS[name], ELEMENTS[name]
    assert element.bits == reference.bits
    assert element.mantissa_bits == reference.mantissa_bits
    assert element.max_value == reference.max_value
    assert element.max_exponent == reference.max_exponent
    assert element.max_code == reference.finite_codes - 1
    assert 2.0**element.min_exponent == reference.magnitudes[1 << reference.mantissa_bits]


@pytest.mark.parametrize("name, element", ELEMENT_OF_FORMAT.items())
def test_mx_formats_share_one_power_of_two_among_32(name: str, element: str) -> None:
    fmt = FORMATS[name]
    assert fmt.element is ELEMENT_FORMATS[element]
    assert (fmt.block_size, fmt.scale_format, fmt.per_tensor) == (32, "e8m0", False)
    assert set(fmt.scale_modes) == set(MODES)


def test_nvfp4_has_an_e4m3_scale_for_16_and_a_per_tensor_scale() -> None:
    fmt = FORMATS["nvfp4"]
    assert fmt.element is ELEMENT_FORMATS["e2m1"]
    assert (fmt.block_size, fmt.scale_format, fmt.per_tensor) == (16, "e4m3", True)


@pytest.mark.parametrize("name", ACTIVATION_ONLY)
def test_fp8_activations_have_one_fp32_scale_a_row(name: str) -> None:
    fmt = FORMATS[name]
    assert (fmt.block_size, fmt.scale_format, fmt.per_tensor, fmt.scale_modes) == (None, "fp32", False, ())


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_bits_per_weight(name: str) -> None:
    fmt = FORMATS[name]
    bits = fmt.element.bits + (0.5 if name == "nvfp4" else 0.25)
    assert fmt.bits_per_weight == bits
    length = 3 * fmt.block_size
    assert 8 * (fmt.packed_size(length) + fmt.num_blocks(length)) == bits * length


@pytest.mark.parametrize(
    "name, length, packed, blocks",
    [
        ("mxfp4", 1, 1, 1),
        ("mxfp4", 33, 17, 2),
        ("nvfp4", 33, 17, 3),
        ("mxfp6_e2m3", 1, 3, 1),
        ("mxfp6_e2m3", 5, 6, 1),
        ("mxfp6_e3m2", 100, 75, 4),
        ("mxfp8_e4m3", 33, 33, 2),
        ("mxfp4", 0, 0, 0),
    ],
)
def test_sizes_round_up_to_whole_groups_and_blocks(name: str, length: int, packed: int, blocks: int) -> None:
    assert (FORMATS[name].packed_size(length), FORMATS[name].num_blocks(length)) == (packed, blocks)


@pytest.mark.parametrize("alias, name", {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3"}.items())
def test_aliases(alias: str, name: str) -> None:
    assert get_format(alias) is FORMATS[name]


@pytest.mark.parametrize("name", ["MXFP4", "fp4", "mxfp4 ", "int4", ""])
def test_an_unknown_format_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(ValueError) as error:
        get_format(name)
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in WEIGHT_FORMATS)


@pytest.mark.parametrize("name", ACTIVATION_ONLY)
def test_a_format_for_activations_is_no_weight_format(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*activations"):
        get_format(name)


@pytest.mark.parametrize("name", [None, 4, FORMATS["mxfp4"]])
def test_a_format_is_named_by_a_string(name: object) -> None:
    with pytest.raises(TypeError, match="mxfp4"):
        get_format(name)


def test_default_scale_modes() -> None:
    defaults = {name: resolve_scale_mode(FORMATS[name], None) for name in FORMATS}
    others = {"mxfp8_e4m3": "rceil", "mxfp8_e5m2": "rceil", "fp8_e4m3": None, "fp8_e5m2": None}
    assert defaults == dict.fromkeys(FORMATS, "even") | others


@pytest.mark.parametrize(
    "name, mode", [("mxfp4", "EVEN"), ("mxfp8_e4m3", "round"), ("nvfp4", "floor"), ("fp8_e4m3", "even")]
)
def test_a_scale_mode_that_the_format_has_not_is_refused(name: str, mode: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_scale_mode(FORMATS[name], mode)
    message = str(error.value)
    assert repr(mode) in message
    assert name in message
    assert all(known in message for known in FORMATS[name].scale_modes)


def test_formats_are_frozen_and_hashable() -> None:
    assert len(dict.fromkeys(FORMATS.values())) == len(FORMATS)
    with pytest.raises(AttributeError):
        FORMATS["mxfp4"].block_size = 16
