"""The config dataclasses, their shorthands, and the mappings from names to configs.

A config gives the scheme of a weight, the algorithm that finds its codes, and the backend. It is validated when it is
built. Only the backend's name is looked up later, by `quantize_`, as backends may be registered until then.

The classes derive from `torchao.core.config.AOBaseConfig`, so that `torchao.quantization.quantize_` takes them too.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchao.core.config import AOBaseConfig

from mxquant.config_hints import FIELDS_ELSEWHERE, activation_hint, field_hint, format_hint, type_hint
from mxquant.formats.spec import FORMAT_ALIASES, WEIGHT_FORMATS, get_format
from mxquant.scheme import Scheme

KINDS = ("linear", "moe")
"""The kinds of weights that a mapping can name: of `nn.Linear` modules, and stacked experts of MoE blocks."""
ALGORITHMS = ("rtn", "gptq")
"""How codes are found: by rounding to nearest, or by GPTQ with its default settings."""
EVERY_KIND = "linear and moe"
"""The key of a config that was given without a mapping."""


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """Settings of GPTQ; see `mxquant.algorithms`. `algorithm="gptq"` in a config means the defaults.

    Args:
        damping: added to the Hessian's diagonal, as a share of its mean; positive.
        act_order: round the columns of the largest inputs first. Scales are then those of the original weight.
        sequential: calibrate each layer on the outputs of the quantized layers before it; else on those of the original
            model, which takes about half the time.
        min_tokens: a weight, or one expert, that sees fewer tokens is rounded to nearest.

    Raises:
        ValueError, TypeError: a value of the wrong kind or out of range.
    """

    damping: float = 0.01
    act_order: bool = False
    sequential: bool = True
    min_tokens: int = 128

    def __post_init__(self) -> None:
        if type(self.damping) not in (float, int) or not 0 < self.damping < math.inf:
            raise ValueError(f"damping={self.damping!r}: it is a positive number; 0.01 is usual")
        for name in ("act_order", "sequential"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name}={getattr(self, name)!r}: it is True or False")
        if type(self.min_tokens) is not int or self.min_tokens < 1:
            raise ValueError(f"min_tokens={self.min_tokens!r}: it is an integer from 1 on")


@dataclass(frozen=True, kw_only=True, repr=False)
class MXConfig(AOBaseConfig):
    """The fields that all configs share (documented at `MXFP4Config`), and their validation."""

    activation: str | None = "same"
    scale_mode: str = "even"
    activation_scale_mode: str | None = None
    backend: str = "auto"
    rotation: int | None = None
    algorithm: str | GPTQ = "rtn"

    def __new__(cls, *args: object, **keywords: object) -> MXConfig:
        """Refuse unknown keywords, with the remedy. The dataclass would only say that they are unexpected."""
        known = [option.name for option in fields(cls)]
        for name in keywords.keys() - set(known):
            hint = field_hint(name, known)
            raise TypeError(f"{cls.__name__} got an unexpected keyword {name!r}; use any of {', '.join(known)}{hint}")
        return super().__new__(cls)

    @property
    @abc.abstractmethod
    def format(self) -> str:
        """The weight's format by its full name, such as "mxfp6_e2m3"."""

    @property
    def activation_format(self) -> str | None:
        """The activation's format by its full name; None for weight-only."""
        if self.activation is None:
            return None
        return self.format if self.activation == "same" else get_format(self.activation, activation=True).name

    @property
    def scheme(self) -> Scheme:
        """The formats, scale modes and rotation: how a weight is quantized and what its matmul computes."""
        return Scheme(
            self.format, self.activation_format, self.scale_mode, self.activation_scale_mode, rotation=self.rotation
        )

    @property
    def gptq(self) -> GPTQ | None:
        """The settings of GPTQ; None if weights are rounded to nearest."""
        if isinstance(self.algorithm, GPTQ):
            return self.algorithm
        return GPTQ() if self.algorithm == "gptq" else None

    def changes(self) -> list[str]:
        """The fields that differ from their defaults, such as "activation=None"."""
        values = ((option, getattr(self, option.name)) for option in fields(self))
        return [f"{option.name}={value!r}" for option, value in values if value != option.default]

    def __repr__(self) -> str:
        """Without the fields that have their defaults, as mappings show a config for each weight."""
        return f"{type(self).__name__}({', '.join(self.changes())})"

    def __post_init__(self) -> None:
        if not self.scale_mode:
            modes = ", ".join(get_format(self.format).scale_modes)
            raise ValueError(f"scale_mode={self.scale_mode!r} is unknown for {self.format}; use one of {modes}")
        try:
            _ = self.activation_format
        except (TypeError, ValueError) as error:
            others = f"activation can also be 'same' (here: {self.format}) or None (weight-only)"
            others += activation_hint(self.activation)
            raise type(error)(f"activation={self.activation!r}: {error}; {others}") from None
        _ = self.scheme
        if not isinstance(self.algorithm, GPTQ) and self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} is unknown; use 'rtn', 'gptq' or a mxquant.GPTQ(...)")
        if not isinstance(self.backend, str):
            raise TypeError(
                f"backend must be 'auto' or a name in mxquant.list_backends(); got {self.backend!r}, which is no string"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class MXFP4Config(MXConfig):
    """MXFP4: E2M1 codes and one E8M0 scale a block of 32; 4.25 bits a weight.

    Args:
        activation: the format that activations are quantized to in the matmul: "same" as the weight's, another format's
            name ("mxfp8", "fp8_e4m3", ...), or None for weight-only.
        scale_mode: of the weight's scales: "floor", "even", "ceil", "rceil", "even_fp4", or "mse" by search.
        activation_scale_mode: of the activations' scales; None: their format's default, whatever `scale_mode` is.
        backend: "auto" for the first registered backend that computes this config exactly, or a backend's name.
        rotation: 32 to rotate each block of weights, and of activations in the matmul, by a Hadamard matrix, which
            spreads outliers over the block; K must be a multiple of 32. None: no rotation.
        algorithm: how codes are found: "rtn" (rounding to nearest), or "gptq" or a `GPTQ(...)`, which need
            `quantize_(..., calibration=batches)`.

    Raises:
        ValueError: an unknown format or scale mode, or an `activation_scale_mode` for activations that have none.
        TypeError: a format or a backend that is not named by a string.
    """

    @property
    def format(self) -> str:
        return "mxfp4"


@dataclass(frozen=True, repr=False)
class MXFP6Config(MXConfig):
    """MXFP6: packed 6-bit codes and one E8M0 scale a block of 32; 6.25 bits a weight.

    Args:
        element: "e2m3" (finer) or "e3m2" (wider).
        activation, scale_mode, activation_scale_mode, backend, rotation, algorithm: as for `MXFP4Config`.
    """

    element: str = "e2m3"

    @property
    def format(self) -> str:
        return _format_of("mxfp6", self.element)


@dataclass(frozen=True, repr=False)
class MXFP8Config(MXConfig):
    """MXFP8: 8-bit codes and one E8M0 scale a block of 32; 8.25 bits a weight. Its scale mode is "rceil" by default.

    Args:
        element: "e4m3" (finer) or "e5m2" (wider).
        activation, scale_mode, activation_scale_mode, backend, rotation, algorithm: as for `MXFP4Config`.
    """

    element: str = "e4m3"
    scale_mode: str = field(default="rceil", kw_only=True)

    @property
    def format(self) -> str:
        return _format_of("mxfp8", self.element)


@dataclass(frozen=True, kw_only=True, repr=False)
class NVFP4Config(MXConfig):
    """NVFP4: E2M1 codes, one E4M3 scale a block of 16 and one fp32 scale a tensor; 4.5 bits a weight.

    Args:
        activation, activation_scale_mode, backend, algorithm: as for `MXFP4Config`.
        scale_mode: "even" (block scales are rounded to the nearest E4M3 value), or "four_over_six" (each block's
            maximum becomes 6 or 4, whichever gives the smaller error).
        rotation: as for `MXFP4Config`, but 16.
    """

    @property
    def format(self) -> str:
        return "nvfp4"


@dataclass(frozen=True, kw_only=True, repr=False)
class _NamedConfig(MXConfig):
    """The config of a weight format that has no class of its own. Fields as for `MXFP4Config`."""

    weight: str

    @property
    def format(self) -> str:
        return self.weight


def _format_of(family: str, element: object) -> str:
    accepted = [name.removeprefix(f"{family}_") for name in WEIGHT_FORMATS if name.startswith(family)]
    if element in accepted:
        return f"{family}_{element}"
    kind = ValueError if isinstance(element, str) else TypeError
    near = [name for name in accepted if name in str(element).lower()]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise kind(f"element {element!r} is unknown to {family}; use one of {', '.join(accepted)}{hint}")


def mxfp4(**fields: Any) -> MXFP4Config:
    """`MXFP4Config` with the same keywords."""
    return MXFP4Config(**fields)


def mxfp6(element: str = "e2m3", **fields: Any) -> MXFP6Config:
    """`MXFP6Config` with the same keywords."""
    return MXFP6Config(element, **fields)


def mxfp8(element: str = "e4m3", **fields: Any) -> MXFP8Config:
    """`MXFP8Config` with the same keywords."""
    return MXFP8Config(element, **fields)


def nvfp4(**fields: Any) -> NVFP4Config:
    """`NVFP4Config` with the same keywords."""
    return NVFP4Config(**fields)


_SHORTHANDS = {"mxfp4": mxfp4, "mxfp6": mxfp6, "mxfp8": mxfp8, "nvfp4": nvfp4}
CONFIG_FIELDS = ("weight", *(option.name for option in fields(MXConfig)))
_FIELDS_OR_MISTAKEN = {*CONFIG_FIELDS, *FIELDS_ELSEWHERE}
_ACCEPTED = (
    f"a config such as MXFP4Config(), a format's name ({', '.join((*WEIGHT_FORMATS, *FORMAT_ALIASES))}), "
    "a dict such as {'weight': 'mxfp4', 'activation': None}, or None to skip"
)

_SHOWN = 80
"""Characters of a value in a message. The repr of another library's config has many lines."""


def resolve_config(value: object) -> MXConfig | None:
    """`value` as a config; None if it is None, which skips a weight.

    Args:
        value: a config; a weight format's name; a dict with "weight" (a format's name) and fields of a config; or None.

    Raises:
        ValueError: an unknown name, field or value.
        TypeError: none of these.
    """
    if value is None or isinstance(value, MXConfig):
        return value
    if isinstance(value, str):
        return _named_config(value)
    if isinstance(value, Mapping):
        return _config_from_dict(value)
    if isinstance(value, type) and issubclass(value, MXConfig):
        raise TypeError(f"{value.__name__} is the class; pass an instance: {value.__name__}()")
    for name, shorthand in _SHORTHANDS.items():
        if value is shorthand:
            raise TypeError(f"{name} is the function; call it for a config: {name}()")
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    raise TypeError(f"{shown} is not a config; use {_ACCEPTED}{type_hint(value)}")


def resolve_mapping(config: object) -> dict[str, MXConfig | None]:
    """`config` as a mapping from keys (kinds, names, patterns) to configs, or to None for what is skipped.

    A single config applies to every linear and all experts. A dict is a single config if it has the key "weight" and
    otherwise only fields of a config, known or mistaken.

    Raises:
        ValueError, TypeError: as `resolve_config`, naming the key; an empty mapping; None; a key that is not a string.
    """
    if isinstance(config, Mapping) and not ("weight" in config and set(config) <= _FIELDS_OR_MISTAKEN):
        if not config:
            raise ValueError(f"the config mapping is empty; give it keys such as 'linear', or pass {_ACCEPTED}")
        return {key: _resolve_entry(key, value) for key, value in config.items()}
    resolved = resolve_config(config)
    if resolved is None:
        raise TypeError(f"config is None, which quantizes nothing; use {_ACCEPTED} (None only as a mapping's value)")
    return {EVERY_KIND: resolved}


def _resolve_entry(key: object, value: object) -> MXConfig | None:
    if not isinstance(key, str) or not key:
        raise TypeError(
            f"a mapping's key must be 'linear', 'moe', a module's or parameter's name, a glob or 're:...'; got {key!r}"
        )
    try:
        return resolve_config(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"config of key {key!r}: {error}") from None


def _named_config(name: str, **options: Any) -> MXConfig:
    """The config whose weight format is `name`, with `options` for its other fields."""
    known = (*WEIGHT_FORMATS, *FORMAT_ALIASES)
    if name not in known:
        raise ValueError(f"{name!r} is not a config; use {_ACCEPTED}{format_hint(name)}")
    family, _, element = name.partition("_")
    if family in _SHORTHANDS:
        return _SHORTHANDS[family](*[element] if element else [], **options)
    return _NamedConfig(weight=name, **{"scale_mode": get_format(name).default_scale_mode} | options)


def _config_from_dict(value: Mapping[object, object]) -> MXConfig:
    options = dict(value)
    weight = options.pop("weight", None)
    if not isinstance(weight, str):
        raise ValueError(
            f"a config given as a dict needs 'weight', a format's name ({', '.join(WEIGHT_FORMATS)}); "
            f"got {dict(value)!r} (to skip, use None instead of a dict)"
        )
    for key in options:
        if key not in CONFIG_FIELDS:
            hint = field_hint(str(key), CONFIG_FIELDS)
            raise ValueError(f"{key!r} is not a field of a config; use any of {', '.join(CONFIG_FIELDS)}{hint}")
    return _named_config(weight, **{str(key): option for key, option in options.items()})
