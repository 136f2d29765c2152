"""What a quantized matmul computes, in one record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxquant.formats.spec import get_format, resolve_scale_mode


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantized, and how the activations that it multiplies are.

    Names are stored in full ("mxfp8" becomes "mxfp8_e4m3"), and an activation's scale mode is stored resolved: two
    schemes that compute the same are equal.

    Raises:
        ValueError: an unknown format or scale mode, a mode or static scale that the activation cannot have, or a
            rotation that is not the weight format's block size.
        TypeError: a format that is not named by a string.
    """

    weight: str
    activation: str | None = None
    """Format that a matmul along the blocked axis quantizes its other operand to; None: weight-only."""
    scale_mode: str | None = None
    """How the scales of a weight that is yet to be quantized are found; None: its format's default.

    `Metadata` and `Problem` have None here: the scales exist, and do not tell how they were found.
    """
    activation_scale_mode: str | None = None
    """Of a dynamic activation; None where its format has no modes, or there is no activation."""
    static_activation_scale: bool = False
    """Whether the activation's scale is given as a tensor, not computed at run time.

    The tensor decides: `MXTensor` sets this to whether it holds an `activation_scale`. It is not saved.
    """
    rotation: int | None = None
    """Block size of the Hadamard (`mxquant.reference.hadamard`) that weight and activations are rotated by along the
    contraction: the weight format's block, or None.
    """

    def __post_init__(self) -> None:
        weight = get_format(self.weight)
        object.__setattr__(self, "weight", weight.name)
        accepted = (*weight.scale_modes, *weight.searched_scale_modes)
        if self.scale_mode is not None and self.scale_mode not in accepted:
            raise ValueError(
                f"scale_mode={self.scale_mode!r} is unknown for {weight.name}; use one of {', '.join(accepted)}"
            )
        self._resolve_activation()
        if self.rotation is not None and (type(self.rotation) is not int or self.rotation != weight.block_size):
            raise ValueError(
                f"rotation={self.rotation!r} is unknown for {weight.name}; use {weight.block_size}, the size of its "
                "block, or None"
            )

    def _resolve_activation(self) -> None:
        mode = self.activation_scale_mode
        if self.activation is None:
            if mode is not None:
                raise ValueError(
                    f"activation_scale_mode={mode!r} given, but activation is None (weight-only); leave "
                    "activation_scale_mode out, or name an activation format"
                )
            if self.static_activation_scale:
                raise ValueError("a static activation scale given, but activation is None (weight-only); leave it out")
            return
        activation = get_format(self.activation, activation=True)
        if self.static_activation_scale and activation.scale_format == "e8m0":
            raise ValueError(
                f"a static activation scale is for nvfp4, fp8_e4m3 and fp8_e5m2; {activation.name} has none"
            )
        object.__setattr__(self, "activation", activation.name)
        try:
            resolved = resolve_scale_mode(activation, mode)
        except ValueError as error:
            raise ValueError(f"activation_scale_mode={mode!r}: {error}") from None
        object.__setattr__(self, "activation_scale_mode", resolved)

    @property
    def precision(self) -> str:
        """Bits of an element of the weight and the activation, such as "W4A4"; A16 for weight-only."""
        activation = 16 if self.activation is None else get_format(self.activation, activation=True).element.bits
        return f"W{get_format(self.weight).element.bits}A{activation}"

    def check_length(self, length: int | torch.SymInt) -> None:
        """Refuse a blocked axis of a `length` that the rotation does not divide, with a ValueError."""
        if self.rotation is not None and length % self.rotation:
            raise ValueError(
                f"rotation={self.rotation} needs a blocked axis of a multiple of {self.rotation} elements; this one "
                f"has {length}. Leave such a weight unrotated (rotation=None)"
            )


class HasScheme:
    """What holds a scheme, and reads its activation's fields and rotation as its own."""

    scheme: Scheme

    @property
    def activation(self) -> str | None:
        return self.scheme.activation

    @property
    def activation_scale_mode(self) -> str | None:
        return self.scheme.activation_scale_mode

    @property
    def rotation(self) -> int | None:
        return self.scheme.rotation
