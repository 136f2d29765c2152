"""Configs: their fields, their validation, their shorthands, and what a mapping's values may be."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torchao.core.config import AOBaseConfig
from torchao.quantization import Int8WeightOnlyConfig

from mxquant.config import (
    EVERY_KIND,
    MXFP4Config,
    MXFP6Config,
    MXFP8Config,
    NVFP4Config,
    mxfp4,
    mxfp6,
    mxfp8,
    nvfp4,
    resolve_config,
    resolve_mapping,
)

DEFAULTS = [
    (MXFP4Config(), "mxfp4", "even"),
    (MXFP6Config(), "mxfp6_e2m3", "even"),
    (MXFP6Config("e3m2"), "mxfp6_e3m2", "even"),
    (MXFP8Config(), "mxfp8_e4m3", "rceil"),
    (MXFP8Config(element="e5m2"), "mxfp8_e5m2", "rceil"),
    (NVFP4Config(), "nvfp4", "even"),
]


@pytest.mark.parametrize("config, name, scale_mode", DEFAULTS, ids=repr)
def test_defaults(config: Any, name: str, scale_mode: str) -> None:
    assert isinstance(config, AOBaseConfig)
    assert (config.format, config.activation_format) == (name, name)
    assert (config.scale_mode, config.activation_scale_mode, config.backend) == (scale_mode, None, "auto")


@pytest.mark.parametrize(
    "activation, resolved",
    [
        ("same", "mxfp4"),
        (None, None),
        ("mxfp4", "mxfp4"),
        ("mxfp6", "mxfp6_e2m3"),
        ("mxfp8", "mxfp8_e4m3"),
        ("mxfp8_e5m2", "mxfp8_e5m2"),
        ("nvfp4", "nvfp4"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
    ],
)
def test_activation_formats(activation: str | None, resolved: str | None) -> None:
    assert MXFP4Config(activation=activation).activation_format == resolved


@pytest.mark.parametrize("mode", ["floor", "even", "ceil", "rceil", "even_fp4"])
def test_scale_modes(mode: str) -> None:
    config = MXFP8Config(scale_mode=mode, activation="mxfp4", activation_scale_mode=mode)
    assert (config.scale_mode, config.activation_scale_mode) == (mode, mode)


def test_configs_are_values() -> None:
    configs = [config for config, *_ in DEFAULTS]
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
        with pytest.raises(AttributeError):
            config.backend = "emulation"
    assert MXFP4Config(activation=None) != MXFP4Config()


def test_repr_is_the_call() -> None:
    """Without what is the default."""
    assert repr(MXFP6Config("e3m2", activation=None)) == "MXFP6Config(activation=None, element='e3m2')"
    assert repr(MXFP8Config()) == "MXFP8Config()"
    assert repr(MXFP8Config(scale_mode="even")) == "MXFP8Config(scale_mode='even')"
    for config, *_ in DEFAULTS:
        assert eval(repr(config)) == config


def test_only_the_element_is_positional() -> None:
    with pytest.raises(TypeError, match="positional"):
        MXFP4Config("same")
    with pytest.raises(TypeError, match="positional"):
        MXFP8Config("e4m3", "same")


def test_shorthands() -> None:
    assert mxfp4(activation=None) == MXFP4Config(activation=None)
    assert mxfp6("e3m2") == mxfp6(element="e3m2") == MXFP6Config("e3m2")
    assert mxfp8(scale_mode="floor") == MXFP8Config(scale_mode="floor")
    assert nvfp4(backend="emulation") == NVFP4Config(backend="emulation")
    with pytest.raises(TypeError, match="calibration"):
        mxfp4(calibration=[])


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda: MXFP4Config(scale_mode="evn"),
            ValueError,
            "scale_mode='evn'.* one of floor, even, ceil, rceil",
        ),
        (lambda: MXFP4Config(scale_mode=None), ValueError, "scale_mode=None .* use one of floor"),
        (
            lambda: NVFP4Config(scale_mode="floor"),
            ValueError,
            "scale_mode='floor'.* nvfp4; use one of even",
        ),
        (lambda: MXFP4Config(activation="int8"), ValueError, "activation='int8'.* mxfp8_e4m3.* 'same' .*or None"),
        (lambda: MXFP4Config(activation=8), TypeError, "activation=8: .* named by a string"),
        (
            lambda: MXFP4Config(activation_scale_mode="up"),
            ValueError,
            "activation_scale_mode='up': .* one of floor",
        ),
        (
            lambda: MXFP4Config(activation="nvfp4", activation_scale_mode="floor"),
            ValueError,
            "activation_scale_mode='floor'.*nvfp4; use one of even",
        ),
        (
            lambda: MXFP4Config(activation=None, activation_scale_mode="even"),
            ValueError,
            r"activation_scale_mode='even' given, but activation is None \(weight-only\); leave",
        ),
        (
            lambda: MXFP4Config(activation="fp8_e4m3", activation_scale_mode="even"),
            ValueError,
            "activation_scale_mode='even'.*fp8_e4m3, which has .* no modes",
        ),
        (lambda: MXFP4Config(backend=None), TypeError, "backend must be 'auto' or a name .*None"),
        (lambda: MXFP4Config(block_size=16), TypeError, "keyword 'block_size'; use any of activation, .* is fixed: 32"),
        (lambda: mxfp4(activations=None), TypeError, "keyword 'activations'; .* did you mean 'activation'"),
        (lambda: mxfp4(filter_fn=len), TypeError, "'filter_fn'; .* an argument of quantize_, not of the config"),
        (lambda: mxfp8(weight_only=True), TypeError, "'weight_only'; use any of .*element.*; activation=None is"),
        (lambda: MXFP4Config(activation=False), TypeError, "activation=False.* did you mean activation=None"),
        (lambda: MXFP4Config(activation=torch.bfloat16), TypeError, "did you mean activation=None"),
        (lambda: MXFP4Config(activation="MXFP6"), ValueError, "did you mean 'mxfp6_e2m3' or 'mxfp6_e3m2'"),
        (lambda: MXFP4Config(algorithm="awq"), ValueError, "'awq' is unknown; use 'rtn', 'gptq'"),
        (lambda: MXFP8Config(torch.float8_e4m3fn), TypeError, "did you mean 'e4m3'"),
        (lambda: MXFP6Config("e4m3"), ValueError, "element 'e4m3' is unknown to mxfp6; use one of e2m3, e3m2"),
        (lambda: MXFP8Config(4), TypeError, "element 4 is unknown to mxfp8; use one of e4m3, e5m2"),
    ],
)
def test_bad_fields_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "value, config",
    [
        ("mxfp4", MXFP4Config()),
        ("mxfp6", MXFP6Config()),
        ("mxfp6_e2m3", MXFP6Config()),
        ("mxfp6_e3m2", MXFP6Config("e3m2")),
        ("mxfp8", MXFP8Config()),
        ("mxfp8_e4m3", MXFP8Config()),
        ("mxfp8_e5m2", MXFP8Config("e5m2")),
        ("nvfp4", NVFP4Config()),
        (MXFP4Config(activation=None), MXFP4Config(activation=None)),
        (None, None),
        ({"weight": "mxfp4"}, MXFP4Config()),
        ({"weight": "mxfp4", "activation": None}, MXFP4Config(activation=None)),
        ({"weight": "mxfp6_e3m2", "activation": "fp8_e4m3"}, MXFP6Config("e3m2", activation="fp8_e4m3")),
        (
            {"weight": "mxfp8", "scale_mode": "floor", "activation_scale_mode": "even", "backend": "emulation"},
            MXFP8Config(scale_mode="floor", activation_scale_mode="even", backend="emulation"),
        ),
    ],
    ids=str,
)
def test_values(value: object, config: object) -> None:
    assert resolve_config(value) == config


@pytest.mark.parametrize(
    "value, error, message",
    [
        (mxfp4, TypeError, r"mxfp4 is the function; call it for a config: mxfp4\(\)"),
        ("MXFP4", ValueError, "'MXFP4' is not a config; use .* did you mean 'mxfp4'"),
        ("fp4", ValueError, "did you mean 'mxfp4' or 'nvfp4'"),
        ("mx_fp4", ValueError, "did you mean 'mxfp4'"),
        ("nvfp4_e2m1", ValueError, r"did you mean 'nvfp4'\?"),
        ("MXFP8E5M2", ValueError, r"did you mean 'mxfp8_e5m2'\?"),
        ("int4", ValueError, "there are no integer formats, of that size there is 'mxfp4' or 'nvfp4'"),
        ("w4a16", ValueError, "w4a16 is 'mxfp4' or 'nvfp4' with activation=None"),
        (torch.float4_e2m1fn_x2, TypeError, "torch.float4_e2m1fn_x2 is not .* did you mean 'mxfp4' or 'nvfp4'"),
        (torch.float8_e5m2, TypeError, "did you mean 'mxfp8_e5m2'"),
        (8, TypeError, "8 is not a config; .* did you mean 'mxfp8_e4m3' or"),
        (True, TypeError, "True is not a config; .* None to skip$"),
        (Int8WeightOnlyConfig, TypeError, "torchao.quantization.quantize_ for torchao's own"),
        ({"weight": "mxfp4", "block_size": 16}, ValueError, "'block_size' is not a field .* block is fixed: 32"),
        ({"weight": "mxfp4", "activation": "none"}, ValueError, "did you mean activation=None"),
        ("mxpf4", ValueError, "'mxpf4' is not a config; use .*mxfp4.*did you mean 'mxfp4'"),
        ("fp8_e4m3", ValueError, "'fp8_e4m3' is not a config"),
        (4, TypeError, "4 is not a config; use .* None to skip"),
        (MXFP4Config, TypeError, r"MXFP4Config is the class; pass an instance: MXFP4Config\(\)"),
        (Int8WeightOnlyConfig(), TypeError, "torchao.quantization.quantize_ for torchao's own"),
        ({"activation": None}, ValueError, "needs 'weight'.* got {'activation': None}"),
        ({"weight": None}, ValueError, "needs 'weight'.* use None instead"),
        ({"weight": "mxfp5"}, ValueError, "'mxfp5' is not a config"),
        (
            {"weight": "mxfp4", "activations": None},
            ValueError,
            "'activations' is not a .* mean 'activation'",
        ),
        ({"weight": "mxfp4", "activation": "fp4"}, ValueError, "activation='fp4'"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bad_values_are_refused(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_config(value)
    with pytest.raises(error, match=f"config of key 'linear': .*{message}"):
        resolve_mapping({"linear": value})


def test_configs_of_transformers_are_pointed_to_from_pretrained() -> None:
    transformers = pytest.importorskip("transformers")
    for value in (transformers.Mxfp4Config, transformers.BitsAndBytesConfig(load_in_4bit=True)):
        with pytest.raises(
            TypeError, match=r"config of transformers, for from_pretrained\(\.\.\., quantization_"
        ) as info:
            resolve_config(value)
        assert "\n" not in str(info.value)


@pytest.mark.parametrize("value", ["mxfp4", MXFP4Config(), {"weight": "mxfp4"}], ids=str)
def test_a_single_config_means_every_kind(value: object) -> None:
    assert resolve_mapping(value) == {EVERY_KIND: MXFP4Config()}


def test_a_kind_means_itself() -> None:
    assert resolve_mapping({"linear": "mxfp4"}) == {"linear": MXFP4Config()}


def test_mapping_values_are_resolved() -> None:
    value = {"linear": "mxfp8", "moe": mxfp4(), "lm_head": None, "re:.*q": {"weight": "mxfp6", "activation": None}}
    assert resolve_mapping(value) == {
        "linear": MXFP8Config(),
        "moe": MXFP4Config(),
        "lm_head": None,
        "re:.*q": MXFP6Config(activation=None),
    }


def test_a_parameter_called_weight_is_a_key_beside_others() -> None:
    assert resolve_mapping({"weight": "mxfp4", "linear": None}) == {"weight": MXFP4Config(), "linear": None}


@pytest.mark.parametrize(
    "value, error, message",
    [
        (None, TypeError, "None, which quantizes nothing"),
        ({}, ValueError, "mapping is empty; give it keys"),
        ({3: "mxfp4"}, TypeError, "key must be 'linear', 'moe', .*; got 3"),
        ({"": "mxfp4"}, TypeError, "key must be .*; got ''"),
        ([MXFP4Config()], TypeError, "is not a config"),
    ],
    ids=str,
)
def test_bad_mappings_are_refused(value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_mapping(value)
