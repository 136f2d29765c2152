"""Scheme: one record of what a matmul computes, and what config, metadata and problem make of it."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mxquant import MXFP4Config, MXFP8Config, NVFP4Config, quantize, register_backend
from mxquant.backends import DGRAD, FORWARD, Backend, Operand, Problem, unregister_backend
from mxquant.formats import ACTIVATION_FORMATS, WEIGHT_FORMATS, get_format
from mxquant.scheme import Scheme
from mxquant.tensor import describe
from mxquant.tensor.metadata import metadata_from_json


@pytest.mark.parametrize("activation", [None, *ACTIVATION_FORMATS])
@pytest.mark.parametrize("weight", WEIGHT_FORMATS)
def test_every_pair_of_formats_is_a_scheme_with_the_default_scale_mode(weight: str, activation: str | None) -> None:
    scheme = Scheme(weight, activation)
    default = None if activation is None else get_format(activation, activation=True).default_scale_mode
    assert scheme.activation_scale_mode == default
    assert scheme == Scheme(weight, activation, activation_scale_mode=default)
    assert hash(scheme) == hash(Scheme(weight, activation, activation_scale_mode=default))


def test_aliases_are_stored_as_full_names() -> None:
    assert Scheme("mxfp8", "mxfp6") == Scheme("mxfp8_e4m3", "mxfp6_e2m3")


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"weight": "fp8_e4m3"}, ValueError, "'fp8_e4m3' is for activations only"),
        ({"weight": 4}, TypeError, "named by a string"),
        ({"activation": "int8"}, ValueError, "'int8' is unknown"),
        ({"scale_mode": "up"}, ValueError, "scale_mode='up' is unknown for mxfp4; use one of floor"),
        ({"activation_scale_mode": "even"}, ValueError, "activation is None"),
        ({"activation": "fp8_e4m3", "activation_scale_mode": "even"}, ValueError, "has .* no modes"),
        ({"activation": "nvfp4", "activation_scale_mode": "floor"}, ValueError, "nvfp4; use one of even"),
        ({"static_activation_scale": True}, ValueError, "static .* activation is None"),
        ({"activation": "mxfp4", "static_activation_scale": True}, ValueError, "mxfp4 has none"),
        ({"rotation": 16}, ValueError, "rotation=16 is unknown for mxfp4; use 32"),
        ({"rotation": True}, ValueError, "rotation=True is unknown"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Scheme(**{"weight": "mxfp4"} | fields)


def test_a_length_that_the_rotation_does_not_divide_is_refused() -> None:
    Scheme("mxfp4").check_length(33)
    Scheme("mxfp4", rotation=32).check_length(64)
    with pytest.raises(ValueError, match="multiple of 32 elements; this one has 33"):
        Scheme("mxfp4", rotation=32).check_length(33)


@pytest.mark.parametrize(
    "weight, activation, precision",
    [("mxfp4", "mxfp4", "W4A4"), ("mxfp4", None, "W4A16"), ("mxfp6", "mxfp8", "W6A8"), ("nvfp4", "fp8_e5m2", "W4A8")],
)
def test_precision_counts_element_bits(weight: str, activation: str | None, precision: str) -> None:
    assert Scheme(weight, activation).precision == precision


def test_a_config_and_the_weight_made_by_it_have_one_scheme_but_for_the_weights_scale_mode() -> None:
    for config in (MXFP4Config(rotation=32), MXFP8Config(activation=None), NVFP4Config(scale_mode="four_over_six")):
        scheme = config.scheme
        assert scheme.scale_mode == config.scale_mode
        weight = quantize(torch.randn(8, 64), scheme.weight, scale_mode=scheme.scale_mode, rotation=scheme.rotation)
        weight = weight.with_activation(scheme.activation, scheme.activation_scale_mode)
        assert weight.metadata.scheme == dataclasses.replace(scheme, scale_mode=None)
        assert describe(weight).scheme == weight.metadata.scheme


def test_static_follows_from_the_tensor_that_is_there() -> None:
    dynamic = quantize(torch.randn(8, 64), "nvfp4").with_activation("nvfp4")
    static = dynamic.with_activation("nvfp4", scale=torch.tensor(0.5))
    assert not dynamic.metadata.scheme.static_activation_scale
    assert static.metadata.scheme.static_activation_scale
    for operand in (dynamic.operand, static.operand):
        for metadata in (dynamic.metadata, static.metadata):
            rebuilt = type(dynamic)(operand, metadata, dynamic.shape)
            given = rebuilt.activation_scale is not None
            assert rebuilt.metadata.scheme.static_activation_scale is given
            assert describe(rebuilt).static_activation_scale is given


def test_the_saved_json_keeps_its_bytes() -> None:
    weight = quantize(torch.randn(8, 64), "nvfp4", rotation=16).with_activation("nvfp4", scale=torch.tensor(0.5))
    text = weight.metadata.to_json((8, 64))
    assert text == (
        '{"activation": "nvfp4", "activation_scale_mode": "even", "axis": -1, "block_offset": 0, "dtype": "float32", '
        '"format": "nvfp4", "layout": "canonical", "rotation": 16, "shape": [8, 64], "version": 1}'
    )
    metadata, shape = metadata_from_json(text)
    assert shape == (8, 64)
    assert metadata == weight.metadata.with_scheme(static_activation_scale=False)


@pytest.mark.usefixtures("fixed_backends")
def test_a_backend_gets_the_weights_format_alone_in_dgrad() -> None:
    problems: list[Problem] = []

    @register_backend
    class Listening(Backend):
        name = "listening"

        def reject(self, problem: Problem) -> str | None:
            return None

        def matmul(self, x: Tensor, weight: Operand, bias: Tensor | None, problem: Problem) -> Tensor:
            problems.append(problem)
            return x.new_zeros(x.shape[0], problem.width)

    try:
        weight = quantize(torch.randn(8, 64), "mxfp4", rotation=32).with_activation("mxfp4")
        assert (torch.randn(3, 64) @ weight.t()).shape == (3, 8)
        assert (torch.randn(3, 8) @ weight).shape == (3, 64)
    finally:
        unregister_backend("listening")
    assert [problem.contraction for problem in problems] == ["blocked", "unblocked"] == [FORWARD, DGRAD]
    assert [problem.scheme for problem in problems] == [weight.metadata.scheme, Scheme("mxfp4")]


def test_a_problem_tells_the_fields_of_its_scheme() -> None:
    static = quantize(torch.randn(8, 64), "nvfp4", rotation=16).with_activation("nvfp4", scale=torch.tensor(0.5))
    problem = describe(static)
    told = (problem.weight, problem.activation, problem.activation_scale_mode, problem.static_activation_scale)
    assert (*told, problem.rotation) == ("nvfp4", "nvfp4", "even", True, 16)
    assert re.search("nvfp4", repr(problem))
