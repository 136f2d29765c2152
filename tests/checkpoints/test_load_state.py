"""`load_state`: every producer's recorded checkpoint, bit by bit, and torchao's and mxquant's own made here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints.recorded import NAMES, SCHEMES, folder, producer_of, tensors
from mxquant import MXTensor, flatten_state_dict, load_state, quantize
from mxquant.checkpoints import read_content
from mxquant.checkpoints.files import Reader
from mxquant.checkpoints.producer import module_of
from mxquant.checkpoints.weight_spec import unswizzle


@pytest.mark.parametrize("name", NAMES)
def test_values_equal_the_tools_dequantized_values(name: str) -> None:
    state, expected = load_state(folder(name)), tensors(name, "reference_dequant")
    assert expected
    for key, values in expected.items():
        assert isinstance(state[key], MXTensor)
        assert torch.equal(state[key].dequantize(torch.bfloat16), values)
    quantized = {key for key, tensor in state.items() if isinstance(tensor, MXTensor)}
    assert quantized == set(expected)


@pytest.mark.parametrize("name", NAMES)
def test_activation_scheme_follows_the_config(name: str) -> None:
    """W4A16 is not taken for W4A4, nor the other way round."""
    fmt, activation, mode, static = SCHEMES[name]
    weights = [tensor for tensor in load_state(folder(name)).values() if isinstance(tensor, MXTensor)]
    for weight in weights:
        metadata = weight.metadata
        assert (metadata.scheme.weight, metadata.scheme.activation, metadata.scheme.activation_scale_mode) == (
            fmt,
            activation,
            mode,
        )
        assert (weight.activation_scale is not None) == static


@pytest.mark.parametrize("name", NAMES)
def test_unquantized_tensors_keep_their_bytes(name: str) -> None:
    state, written = load_state(folder(name)), tensors(name)
    content = read_content(folder(name))
    assert content.producer is not None
    assert content.producer.name == producer_of(name)
    used = {part for spec in content.quantized.values() for part in spec.tensor_names}
    assert used | set(content.ordinary) == set(written)
    for key in set(written) - used:
        assert torch.equal(state[key], written[key])
        assert state[key].dtype == written[key].dtype


@pytest.mark.parametrize("name", NAMES)
def test_loaded_tensors_are_views_of_the_file(name: str) -> None:
    """Reading copies nothing: two reads are of the same memory."""
    content = read_content(folder(name))
    reader = Reader(content.checkpoint)
    for spec in content.quantized.values():
        weight = content.read(spec.name, reader)
        assert isinstance(weight, MXTensor)
        assert weight.qdata.data_ptr() == reader.read(spec.qdata).data_ptr()
        assert weight.scale.data_ptr() == reader.read(spec.scale).data_ptr()


def test_static_scales_become_multipliers() -> None:
    """compressed-tensors divides by its global scales, ModelOpt multiplies."""
    for name, part, divided in (
        ("ct_nvfp4_llama", "input_global_scale", True),
        ("modelopt_nvfp4_llama", "input_scale", False),
    ):
        state, written = load_state(folder(name)), tensors(name)
        for key, weight in state.items():
            if isinstance(weight, MXTensor):
                stored = written[key.removesuffix("weight") + part].reshape(())
                assert torch.equal(weight.activation_scale, 1 / stored if divided else stored)


# mxquant's own


def test_native_file_round_trips_bit_for_bit(tmp_path: Path) -> None:
    """Partial blocks, another axis, a per-tensor scale, a rule for activations, tied names."""
    weight = quantize(torch.randn(6, 40), "mxfp4").with_activation("mxfp8")
    state = {
        "a.weight": weight,
        "tied.weight": weight,
        "b": quantize(torch.randn(2, 64, 6), "nvfp4", axis=-2),
        "c": quantize(torch.randn(4, 64), "nvfp4").with_activation("nvfp4", scale=torch.tensor(0.5)),
        "bias": torch.randn(3),
    }
    flat, metadata = flatten_state_dict(state)
    save_file(flat, tmp_path / "model.safetensors", metadata)
    loaded = load_state(tmp_path)
    assert set(loaded) == set(state)
    assert loaded["tied.weight"] is loaded["a.weight"]
    for key, tensor in state.items():
        if isinstance(tensor, MXTensor):
            assert loaded[key].metadata == tensor.metadata
            assert loaded[key].shape == tensor.shape
            for ours, theirs in zip(loaded[key].operand, tensor.operand, strict=True):
                assert (ours is None) == (theirs is None)
                assert ours is None or torch.equal(ours, theirs)
        else:
            assert torch.equal(loaded[key], tensor)


def test_path_may_be_a_single_file(tmp_path: Path) -> None:
    flat, metadata = flatten_state_dict({"w": quantize(torch.randn(4, 64), "mxfp6_e3m2")})
    save_file(flat, tmp_path / "weights.safetensors", metadata)
    assert load_state(tmp_path / "weights.safetensors").keys() == load_state(tmp_path).keys() == {"w"}


def test_unquantized_checkpoint_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert torch.equal(load_state(tmp_path)["w"], torch.ones(2, 3))


# torchao's


def test_torchao_tensors_are_unswizzled_and_packed(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    weight = torch.randn(160, 96, dtype=torch.bfloat16)  # neither a multiple of 128 nor of 4 blocks
    theirs = {}
    for i, element in enumerate((torch.float4_e2m1fn_x2, torch.float8_e4m3fn, "fp6_e2m3", "fp6_e3m2")):
        for swizzled in (True, False):
            tensor = torchao.MXTensor.to_mx(weight, element, 32, is_swizzled_scales=swizzled)
            theirs[f"layers.{i}.{'swizzled' if swizzled else 'linear'}.weight"] = tensor
    scale = torch.tensor(0.01)
    theirs["nv.weight"] = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=True)
    flat, metadata = flatten_tensor_state_dict(theirs | {"nv.bias": torch.ones(3)})
    save_file(flat, tmp_path / "model.safetensors", metadata)
    loaded = load_state(tmp_path)
    assert set(loaded) == {*theirs, "nv.bias"}
    for key, tensor in theirs.items():
        assert torch.equal(loaded[key].dequantize(torch.bfloat16), tensor.dequantize(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 127, 129])
@pytest.mark.parametrize("columns", [1, 3, 4, 5])
def test_unswizzle_inverts_torchaos_swizzle(rows: int, columns: int) -> None:
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    assert torch.equal(unswizzle(to_blocked(scale), (rows, columns)), scale)


# gpt-oss as OpenAI wrote it


def test_experts_in_openais_layout(tmp_path: Path) -> None:
    weight = quantize(torch.randn(3, 8, 64), "mxfp4")
    blocks = weight.qdata.unflatten(-1, (-1, 16))
    flat = {"block.0.mlp.mlp1_weight.blocks": blocks, "block.0.mlp.mlp1_weight.scales": weight.scale}
    save_file(flat | {"block.0.mlp.mlp1_bias": torch.zeros(3, 8)}, tmp_path / "model.safetensors")
    loaded = load_state(tmp_path)
    assert loaded.keys() == {"block.0.mlp.mlp1_weight", "block.0.mlp.mlp1_bias"}
    assert torch.equal(loaded["block.0.mlp.mlp1_weight"].dequantize(), weight.dequantize(torch.bfloat16))


# Configs that say it in another way


def edited(name: str, to: Path, edit) -> Path:  # type: ignore[no-untyped-def]
    """A copy of a recorded checkpoint with its config changed by `edit(quantization_config)`."""
    for file in ("config.json", "model.safetensors", "hf_quant_config.json"):
        if (folder(name) / file).exists():
            shutil.copyfile(folder(name) / file, to / file)
    config = json.loads((to / "config.json").read_text())
    edit(config["quantization_config"])
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_compressed_tensors_w4a4(tmp_path: Path) -> None:
    def edit(config: dict) -> None:
        group = config["config_groups"]["group_0"]
        group["input_activations"] = group["weights"] | {"dynamic": True}

    state = load_state(edited("ct_mxfp4a16_llama", tmp_path, edit))
    weight = state["model.layers.0.mlp.up_proj.weight"]
    assert (weight.activation, weight.metadata.scheme.activation_scale_mode) == ("mxfp4", "even")


def test_compressed_tensors_groups_by_name_precede_groups_by_class(tmp_path: Path) -> None:
    """Two groups of one checkpoint: the attention W4A16, the rest W4A4. Old files lack scale_dtype."""

    def edit(config: dict) -> None:
        groups = config["config_groups"]
        del groups["group_0"]["weights"]["scale_dtype"]
        activations = groups["group_0"]["weights"] | {"dynamic": True}
        groups["group_1"] = groups["group_0"] | {"input_activations": activations, "targets": ["re:.*mlp.*", "x.y"]}

    state = load_state(edited("ct_mxfp4a16_llama", tmp_path, edit))
    assert state["model.layers.1.mlp.up_proj.weight"].activation == "mxfp4"
    assert state["model.layers.1.self_attn.q_proj.weight"].activation is None


def test_compressed_tensors_target_without_a_dot_is_one_module(tmp_path: Path) -> None:
    """ "lm_head" has no dot, as "Linear" has none; it comes first, and no other module has its scheme."""
    activations = {"num_bits": 4, "type": "float", "group_size": 32, "dynamic": True}

    def edit(config: dict) -> None:
        everything = config["config_groups"]["group_0"]
        named = everything | {"input_activations": activations, "targets": ["lm_head"]}
        config["config_groups"] = {"group_0": named, "group_1": everything}

    state = load_state(edited("ct_mxfp4a16_llama", tmp_path, edit))
    assert state["model.layers.0.self_attn.q_proj.weight"].activation is None

    def only_the_head(config: dict) -> None:
        edit(config)
        del config["config_groups"]["group_1"]

    with pytest.raises(ValueError, match=r"not among the targets of any group: \['lm_head'\]"):
        load_state(edited("ct_mxfp4a16_llama", tmp_path, only_the_head))


NAME = "model.layers.1.mlp.down_proj"
OVERLAPS = {
    "an exact name before a pattern": (["re:.*mlp.*"], [NAME], "second"),
    "an exact name before a pattern, in the file's order": ([NAME], ["re:.*mlp.*"], "first"),
    "patterns in sorted order": (["re:.*mlp.*"], [r"re:.*layers[.]1[.]mlp[.]down_proj"], "second"),
    "a pattern before the class": (["Linear"], ["re:.*down_proj"], "second"),
    "no globs": (["model.layers.*"], ["Linear"], "second"),
    "one target twice": (["re:.*mlp.*"], ["re:.*mlp.*"], "second"),
}


@pytest.mark.parametrize("what", OVERLAPS)
def test_overlapping_groups_of_compressed_tensors_are_ordered_as_it_orders_them(what: str, tmp_path: Path) -> None:
    """The first group is W4A16, the second W4A4. The tensors are the same, so that nothing else tells them apart."""
    first, second, chosen = OVERLAPS[what]

    def edit(config: dict) -> None:
        group = config["config_groups"]["group_0"] | {"input_activations": None}
        activations = group["weights"] | {"dynamic": True}
        config["config_groups"] = {
            "group_0": group | {"targets": first},
            "group_1": group | {"targets": second, "input_activations": activations},
            "group_2": group | {"targets": ["Linear"]} if "Linear" not in first + second else group | {"targets": []},
        }

    state = load_state(edited("ct_mxfp4a16_llama", tmp_path, edit))
    assert state[f"{NAME}.weight"].activation == {"first": None, "second": "mxfp4"}[chosen]
    match = pytest.importorskip("compressed_tensors.utils.match")
    groups = dict.fromkeys(first, "first") | dict.fromkeys(second, "second")
    assert groups[match.match_targets(NAME, torch.nn.Linear(1, 1), groups)[0]] == chosen


def test_first_matching_layer_config_of_quark_counts(tmp_path: Path) -> None:
    """A name's pattern in the file's order, then the layer's type, then the global config."""

    def edit(config: dict) -> None:
        quantized = config["global_quant_config"]
        weight_only = quantized | {"input_tensors": None}
        config["global_quant_config"] = {"weight": "unread"}
        config["layer_type_quant_config"] = {"nn.Linear": quantized}
        config["layer_quant_config"] = {"*.up_proj": weight_only, "model.layers.0.mlp.up_proj": quantized}

    state = load_state(edited("quark_mxfp4_w4a4_llama", tmp_path, edit))
    assert state["model.layers.0.mlp.up_proj.weight"].activation is None
    assert state["model.layers.0.mlp.down_proj.weight"].activation == "mxfp4"


def test_exact_layer_name_of_modelopt_precedes_patterns(tmp_path: Path) -> None:
    def edit(config: dict) -> None:
        layers = {"*": {"quant_algo": "unread"}}
        names = {module_of(name): {"quant_algo": "NVFP4"} for name in tensors("modelopt_nvfp4_llama")}
        config |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers | names}

    assert len(read_content(edited("modelopt_nvfp4_llama", tmp_path, edit)).quantized) == 14


def test_quark_layer_configs_are_globs(tmp_path: Path) -> None:
    def edit(config: dict) -> None:
        weight_only = config["global_quant_config"] | {"input_tensors": None}
        config["layer_quant_config"] = {"*mlp.experts.3*": weight_only}

    state = load_state(edited("quark_mxfp4_w4a4_mixtral", tmp_path, edit))
    assert state["model.layers.0.mlp.experts.3.down_proj.weight"].activation is None
    assert state["model.layers.0.mlp.experts.2.down_proj.weight"].activation == "mxfp4"


def test_modelopt_is_recognized_by_its_sidecar_alone(tmp_path: Path) -> None:
    edited("modelopt_nvfp4_llama", tmp_path, lambda config: None)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = read_content(tmp_path)
    assert content.producer is not None
    assert content.producer.name == "modelopt"
    assert len(content.quantized) == 14


def test_modelopt_mixed_precision_names_an_algorithm_for_each_layer(tmp_path: Path) -> None:
    def edit(config: dict) -> None:
        layers = {"model.layers.*": {"quant_algo": "NVFP4"}}
        config |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    assert len(read_content(edited("modelopt_nvfp4_llama", tmp_path, edit)).quantized) == 14


def test_static_scale_of_unquantized_activations_is_refused(tmp_path: Path) -> None:
    def edit(config: dict) -> None:
        layers = {
            "model.layers.*": {"quant_algo": "NVFP4"},
            "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4"},
        }
        config |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    with pytest.raises(ValueError, match=r"input_scale.* belongs to no quantized weight"):
        load_state(edited("modelopt_nvfp4_llama", tmp_path, edit))


@pytest.mark.parametrize(
    "name, edit, named",
    [
        ("ct_mxfp4a16_llama", lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=3), "num_bits"),
        ("ct_mxfp4a16_llama", lambda c: c.update(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        ("ct_mxfp4a16_llama", lambda c: c["config_groups"]["group_0"].update(output_activations={}), "output_activ"),
        ("ct_mxfp4a16_llama", lambda c: c.update(quant_method="awq"), "'awq'"),
        ("quark_mxfp4_w4a4_llama", lambda c: c["global_quant_config"]["weight"].update(dtype="int4"), "int4"),
        ("quark_mxfp4_w4a4_llama", lambda c: c["global_quant_config"]["weight"].update(group_size=64), "group"),
        ("quark_mxfp4_w4a4_llama", lambda c: c["global_quant_config"].update(output_tensors={}), "output_tensors"),
        ("quark_mxfp4_w4a4_llama", lambda c: c.update(algo_config=[{"name": "rotation", "r4": True}]), "'rotation'"),
        ("quark_mxfp4_w4a4_llama", lambda c: c.update(algo_config={"name": "svdquant"}), "'svdquant'"),
        ("quark_mxfp4_w4a4_llama", lambda c: c.update(softmax_quant_spec={}), "softmax"),
        ("modelopt_nvfp4_llama", lambda c: c.update(quant_algo="FP8"), "'FP8'"),
    ],
)
def test_unsupported_scheme_is_refused(name: str, edit, named: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NotImplementedError, match=named):
        load_state(edited(name, tmp_path, edit))


def test_algorithms_and_kv_cache_outputs_that_change_no_value_are_read(tmp_path: Path) -> None:
    """Algorithms that are folded into the weights, and outputs of keys and values, which are the cache."""
    name = "quark_mxfp4_w4a4_llama"

    def edit(config: dict) -> None:
        outputs = config["global_quant_config"] | {"output_tensors": {"dtype": "fp8_e4m3"}}
        config["layer_quant_config"] = {"*k_proj": outputs, "*v_proj": outputs}
        config["kv_cache_quant_config"] = {"*k_proj": outputs}
        config["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
        config["algo_config"] = [{"name": "autosmoothquant"}, {"name": "gptq", "damp_percent": 0.01}]

    state, expected = (load_state(p) for p in (edited(name, tmp_path, edit), folder(name)))
    assert state.keys() == expected.keys()
