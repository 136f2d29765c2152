"""The formats by name: element formats, block sizes, scale formats and the scale modes each accepts.

Data only. Sources: OCP Microscaling Formats (MX) v1.0, sections 5.2 to 5.4; NVIDIA's NVFP4 (E2M1, blocks of 16, one
E4M3 scale a block and one fp32 scale a tensor).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MX_SCALE_MODES = ("floor", "even", "ceil", "rceil", "even_fp4")


@dataclass(frozen=True)
class ElementFormat:
    """An element format: the grid of values that elements are rounded to, and the kind of code that stands for each.

    The grid has both signs. From 0 to 2**min_exponent its step is 2**(min_exponent - mantissa_bits). From there on each
    binade has 2**mantissa_bits values, up to `max_value`.

    An integer format has one step throughout, so min_exponent and max_exponent are equal. Eight-bit integers in units
    of 2**-6, from -127/64 to 127/64, have mantissa_bits=6, min_exponent=0, max_exponent=0 and max_value=127/64.
    """

    name: str
    kind: str
    """A key of `mxquant.formats.element.CODECS`: "minifloat" is a sign bit, exponent bits and mantissa bits."""
    bits: int
    """Of a code: 4, 6 or 8."""
    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal value: the step is constant from 0 to twice that value."""
    max_exponent: int
    """Exponent of the largest power of two (`emax` of the specification)."""
    max_value: float

    @property
    def exponent_bits(self) -> int:
        """Of a minifloat only."""
        return self.bits - 1 - self.mantissa_bits

    @property
    def bias(self) -> int:
        """Of a minifloat's exponent only."""
        return 1 - self.min_exponent

    @property
    def max_code(self) -> int:
        """The code of `max_value`, if codes from 0 on number the grid in order, as a minifloat's and two's complement's
        do. A minifloat's larger codes below `sign_code` are NaN or Inf (E4M3 and E5M2 only).
        """
        mantissa = self.max_value / 2.0**self.max_exponent
        return ((self.max_exponent + self.bias) << self.mantissa_bits) + int((mantissa - 1) * (1 << self.mantissa_bits))

    @property
    def sign_code(self) -> int:
        """The first bit alone: a minifloat's -0, but the most negative number of two's complement."""
        return 1 << (self.bits - 1)


@dataclass(frozen=True)
class Format:
    """A block format: an element format, a block size and a scale format."""

    name: str
    element: ElementFormat
    block_size: int | None
    """Elements that share a scale, along the blocked axis; None: one scale a row (activations only)."""
    scale_format: str
    """"e8m0" (a power of two, one byte), "e4m3" (one byte) or "fp32"."""
    scale_modes: tuple[str, ...]
    default_scale_mode: str | None
    searched_scale_modes: tuple[str, ...] = ()
    """Modes whose scale depends on all of a block, not on its largest magnitude alone: `mxquant.formats.search`."""

    @property
    def per_tensor(self) -> bool:
        """Whether a second, fp32 scale covers the whole tensor (NVFP4)."""
        return self.scale_format == "e4m3"

    @property
    def codes_per_group(self) -> int:
        """Codes that fill whole bytes: 2 in 1 byte (4 bits), 4 in 3 bytes (6 bits), 1 in 1 (8 bits)."""
        return {4: 2, 6: 4, 8: 1}[self.element.bits]

    @property
    def bytes_per_group(self) -> int:
        return self.codes_per_group * self.element.bits // 8

    @property
    def bits_per_weight(self) -> float:
        """Element bits plus the share in the block's scale byte; per-tensor scales and partial blocks not counted."""
        return self.element.bits + (8 / self.block_size if self.block_size else 0)

    def packed_size(self, length: int) -> int:
        """Bytes that hold `length` codes, in whole groups."""
        return -(-length // self.codes_per_group) * self.bytes_per_group

    def num_blocks(self, length: int) -> int:
        """Blocks that cover `length` elements, the last one possibly partial."""
        return -(-length // self.block_size) if self.block_size else 1


ELEMENT_FORMATS: dict[str, ElementFormat] = {
    element.name: element
    for element in (
        ElementFormat("e2m1", "minifloat", 4, mantissa_bits=1, min_exponent=0, max_exponent=2, max_value=6.0),
        ElementFormat("e2m3", "minifloat", 6, mantissa_bits=3, min_exponent=0, max_exponent=2, max_value=7.5),
        ElementFormat("e3m2", "minifloat", 6, mantissa_bits=2, min_exponent=-2, max_exponent=4, max_value=28.0),
        ElementFormat("e4m3", "minifloat", 8, mantissa_bits=3, min_exponent=-6, max_exponent=8, max_value=448.0),
        ElementFormat("e5m2", "minifloat", 8, mantissa_bits=2, min_exponent=-14, max_exponent=15, max_value=57344.0),
    )
}


def _mx_format(name: str, element: str, default_scale_mode: str) -> Format:
    return Format(name, ELEMENT_FORMATS[element], 32, "e8m0", MX_SCALE_MODES, default_scale_mode, ("mse",))


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        _mx_format("mxfp4", "e2m1", "even"),
        _mx_format("mxfp6_e2m3", "e2m3", "even"),
        _mx_format("mxfp6_e3m2", "e3m2", "even"),
        _mx_format("mxfp8_e4m3", "e4m3", "rceil"),
        _mx_format("mxfp8_e5m2", "e5m2", "rceil"),
        # The E4M3 scale is always rounded to nearest even.
        Format("nvfp4", ELEMENT_FORMATS["e2m1"], 16, "e4m3", ("even",), "even", ("four_over_six",)),
        Format("fp8_e4m3", ELEMENT_FORMATS["e4m3"], None, "fp32", (), None),
        Format("fp8_e5m2", ELEMENT_FORMATS["e5m2"], None, "fp32", (), None),
    )
}

FORMAT_ALIASES = {"mxfp6": "mxfp6_e2m3", "mxfp8": "mxfp8_e4m3"}

WEIGHT_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.block_size is not None)
ACTIVATION_FORMATS = tuple(FORMATS)


def get_format(name: str, *, activation: bool = False) -> Format:
    """The format called `name`, or by an alias.

    Args:
        activation: also accept the formats that only activations can have.

    Raises:
        ValueError: no such format, or an activation format where a weight's is asked for.
        TypeError: `name` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"a format is named by a string, one of {_accepted(activation)}; got {name!r}")
    fmt = FORMATS.get(FORMAT_ALIASES.get(name, name))
    if fmt is not None and (activation or fmt.block_size is not None):
        return fmt
    why = "is unknown" if fmt is None else "is for activations only"
    near = " or ".join(map(repr, similar_formats(name, ACTIVATION_FORMATS if activation else WEIGHT_FORMATS)))
    raise ValueError(
        f"format {name!r} {why}; use one of {_accepted(activation)} (mxfp6 stands for mxfp6_e2m3, mxfp8 for mxfp8_e4m3)"
        + (f"; did you mean {near}?" if near else "")
    )


def similar_formats(text: str, known: Iterable[str]) -> list[str]:
    """At most two of the names `known` that `text` may mean: another spelling, its element's name, or its bits."""
    folded = re.sub("[^a-z0-9]", "", text.removeprefix("torch.").lower())
    bits = next(iter(re.findall(r"(?<!\d)[468](?!\d)", text)), None)
    named: dict[str, list[str]] = {"name": [], "element": [], "bits": []}
    for name in known:
        fmt = FORMATS[FORMAT_ALIASES.get(name, name)]
        family, _, _ = name.partition("_")
        if folded in (name.replace("_", ""), f"{family}{fmt.element.name}"):
            named["name"].append(name)
        elif fmt.element.name in folded and name not in FORMAT_ALIASES:
            named["element"].append(name)
        elif bits == str(fmt.element.bits) and name not in FORMAT_ALIASES:
            named["bits"].append(name)
    return next((names[:2] for names in named.values() if names), [])


def _accepted(activation: bool) -> str:
    return ", ".join(ACTIVATION_FORMATS if activation else WEIGHT_FORMATS)


def resolve_scale_mode(fmt: Format, mode: str | None) -> str | None:
    """`mode`, or the format's default for None.

    Raises:
        ValueError: the format has no such scale mode.
    """
    if mode is None:
        return fmt.default_scale_mode
    accepted = (*fmt.scale_modes, *fmt.searched_scale_modes)
    if mode in accepted:
        return mode
    if not fmt.scale_modes:
        raise ValueError(
            f"scale mode {mode!r} given for {fmt.name}, which has an fp32 scale a row and no modes; drop it"
        )
    raise ValueError(f"scale mode {mode!r} is unknown for {fmt.name}; use one of {', '.join(accepted)}")
