"""Selection: which parameters a mapping chooses, and the reason for each that it does not."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from mxquant.config import MXFP4Config, MXFP6Config, MXFP8Config, resolve_mapping
from mxquant.modules.experts_layouts import unknown_experts
from mxquant.select import FilterFn, select_weights

A, B = MXFP4Config(), MXFP8Config()


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width, bias=False)


class SmallExperts(nn.Module):
    def __init__(self, experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, width))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.randn(experts, width, width))


class Moe(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 64)
        self.experts = SmallExperts(width=width)
        self.shared = nn.Linear(width, width)
        self.shared_expert_gate = nn.Linear(width, 1)
        self.mixing = nn.Linear(width, 8)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.attn = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = mlp


class Decoder(nn.Module):
    def __init__(self, *mlps: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(mlp, width) for mlp in mlps)
        self.lm_head = nn.Linear(width, 64, bias=False)


def decoder() -> Decoder:
    return Decoder(nn.Linear(32, 32), Moe())


def chosen(model: nn.Module, config: object, filter_fn: FilterFn | None = None) -> dict[str, Any]:
    return {target.name: target.config for target in select_weights(model, resolve_mapping(config), filter_fn).targets}


def skipped(model: nn.Module, config: object, filter_fn: FilterFn | None = None) -> dict[str, str]:
    return {skip.name: skip.reason for skip in select_weights(model, resolve_mapping(config), filter_fn).skips}


def listing(model: nn.Module, config: object) -> str:
    lines = [f"{name}: {config.format}" for name, config in chosen(model, config).items()]
    lines += [f"{name}: {reason}" for name, reason in skipped(model, config).items()]
    return "\n".join(lines)


def test_defaults_of_a_decoder() -> None:
    assert_expected_inline(
        listing(decoder(), "mxfp4"),
        """\
layers.0.attn.q_proj.weight: mxfp4
layers.0.attn.o_proj.weight: mxfp4
layers.0.mlp.weight: mxfp4
layers.1.attn.q_proj.weight: mxfp4
layers.1.attn.o_proj.weight: mxfp4
layers.1.mlp.shared.weight: mxfp4
embed.weight: embedding
layers.1.mlp.gate.weight: MoE router
layers.1.mlp.experts.gate_up_proj: stacked experts of unknown layout: register_experts_layout(SmallExperts, ...) tells the K axis
layers.1.mlp.experts.gate_up_proj_bias: stacked experts of unknown layout: register_experts_layout(SmallExperts, ...) tells the K axis
layers.1.mlp.experts.down_proj: stacked experts of unknown layout: register_experts_layout(SmallExperts, ...) tells the K axis
layers.1.mlp.shared_expert_gate.weight: MoE router
layers.1.mlp.mixing.weight: MoE router
lm_head.weight: output embedding""",  # noqa: E501
    )


def test_every_matrix_is_a_target_or_a_skip() -> None:
    model = decoder()
    selection = select_weights(model, resolve_mapping("mxfp4"))
    listed = [item.name for item in (*selection.targets, *selection.skips)]
    assert sorted(listed) == sorted(name for name, parameter in model.named_parameters() if parameter.ndim >= 2)


def test_a_bare_linear_is_the_root() -> None:
    assert chosen(nn.Linear(32, 32), "mxfp4") == {"weight": A}
    assert chosen(nn.Linear(32, 32), {"weight": "mxfp8", "linear": "mxfp4"}) == {"weight": B}


def test_small_linear_without_experts_beside_it_is_no_router() -> None:
    assert set(chosen(nn.ModuleDict({"gate": nn.Linear(32, 4)}), "mxfp4")) == {"gate.weight"}


@pytest.mark.parametrize("name", ["router", "router.layer"])
def test_modules_named_router_are_routers(name: str) -> None:
    model = nn.Module()
    parent = model
    for part in name.split(".")[:-1]:
        parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(name.split(".")[-1], nn.Linear(32, 64))
    model.fc = nn.Linear(32, 32)
    assert skipped(model, "mxfp4") == {f"{name}.weight": "MoE router"}
    assert set(chosen(model, {name: "mxfp4"})) == {f"{name}.weight"}


def test_output_embeddings_are_found_by_the_model_too() -> None:
    class Model(nn.Sequential):
        def get_output_embeddings(self) -> nn.Module:
            return self[1]

    assert skipped(Model(nn.Linear(32, 32), nn.Linear(32, 64)), "mxfp4") == {"1.weight": "output embedding"}


def test_torch_attention() -> None:
    model = nn.TransformerEncoderLayer(32, 2, 64)
    assert_expected_inline(
        listing(model, "mxfp4"),
        """\
self_attn.out_proj.weight: mxfp4
linear1.weight: mxfp4
linear2.weight: mxfp4
self_attn.in_proj_weight: a parameter of MultiheadAttention, neither nn.Linear nor nn.Embedding""",
    )


def test_reasons_of_weights_that_cannot_be_quantized() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(1, 16, 32))
            self.patches = nn.Conv2d(3, 32, 4)
            self.bilinear = nn.Bilinear(32, 32, 32)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
            self.doubling = Doubling(32, 32)
            self.renormed = nn.Embedding(64, 32, max_norm=1.0)
            self.sparse = nn.Embedding(64, 32, sparse=True)
            self.fc = nn.Linear(32, 32)

    model = Vision()
    assert_expected_inline(
        listing(model, "mxfp4"),
        """\
fc.weight: mxfp4
position: a parameter of Vision, neither nn.Linear nor nn.Embedding
patches.weight: a parameter of Conv2d, neither nn.Linear nor nn.Embedding
bilinear.weight: a parameter of Bilinear, neither nn.Linear nor nn.Embedding
normed.parametrizations.weight.original0: a parameter of ParametrizationList, neither nn.Linear nor nn.Embedding
normed.parametrizations.weight.original1: a parameter of ParametrizationList, neither nn.Linear nor nn.Embedding
doubling.weight: Doubling has a forward of its own
renormed.weight: an embedding with max_norm, which rewrites its weight in forward
sparse.weight: an embedding with sparse=True, which is for training its weight""",
    )
    for name in ("position", "patches", "bilinear", "normed", "doubling", "renormed", "sparse"):
        with pytest.raises(ValueError, match=f"key '{name}' selects nothing: it covers {name}.*name nn.Linear"):
            select_weights(model, {name: A})


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"linear": A, "*.q_proj": B}, B),
        ({"*.q_proj": A, "layers.0": B}, B),
        ({"layers.0": A, "layers.0.attn": B}, B),
        ({"layers.0.attn.q_proj": A, "layers.0.attn.q_proj.weight": B}, B),
        ({"layers.*": A, "layers.*.q_proj": B}, B),
        ({"layers.?.attn.*": B, "*": A}, B),
        ({r"re:layers\.\d+\.attn": B, "*.q_proj": A}, B),
        ({"re:.*q_proj": B}, B),
        ({"*q_proj.weight": B}, B),
        ({"layers": B}, B),
        ({"linear": A, "layers.0.attn": None}, None),
        ({"linear": None, "layers.0.attn": B}, B),
        ({"linear": A, "layers.0": None, "layers.0.attn.q_proj": B}, B),
    ],
    ids=str,
)
@pytest.mark.parametrize("backwards", [False, True])
def test_the_most_specific_key_wins(config: dict[str, object], expected: object, backwards: bool) -> None:
    order = reversed(config.items()) if backwards else config.items()
    assert chosen(decoder(), dict(order)).get("layers.0.attn.q_proj.weight") == expected


def test_equally_specific_patterns_must_agree() -> None:
    assert set(chosen(decoder(), {"*.q_proj": "mxfp4", "*q_proj*": "mxfp4"}).values()) == {A}
    with pytest.raises(ValueError, match=r"both match layers.0.attn.q_proj.weight .*equally specific.*name .* exactly"):
        chosen(decoder(), {"*.q_proj": "mxfp4", "*q_proj*": "mxfp8"})


@pytest.mark.parametrize(
    "key, name",
    [
        ("lm_head", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("*head", "lm_head.weight"),
        ("re:lm_.*", "lm_head.weight"),
        ("embed", "embed.weight"),
        ("*embed*", "embed.weight"),
        ("layers.1.mlp.gate", "layers.1.mlp.gate.weight"),
        ("*.gate", "layers.1.mlp.gate.weight"),
        (r"re:.*\.(gate|nothing)", "layers.1.mlp.gate.weight"),
        ("*.shared_expert_gate.weight", "layers.1.mlp.shared_expert_gate.weight"),
    ],
)
def test_default_skips_can_be_named(key: str, name: str) -> None:
    assert chosen(decoder(), {key: "mxfp4"}) == {name: A}


@pytest.mark.parametrize("key", ["*", "layers.1.mlp", "layers.*", "layers.1.mlp.*", r"re:.*\.mlp\.\w+", "*.weight"])
def test_pattern_for_a_position_does_not_name_default_skips(key: str) -> None:
    left_alone = ("embed", "lm_head", "layers.1.mlp.gate", "layers.1.mlp.mixing", "layers.1.mlp.experts")
    names = set(chosen(decoder(), {key: "mxfp4"}))
    assert "layers.1.mlp.shared.weight" in names
    assert not [name for name in names if name.startswith(left_alone)]


def test_none_skips_with_the_key_as_reason() -> None:
    reasons = skipped(decoder(), {"linear": "mxfp4", "layers.0": None, "lm_head": None})
    assert reasons["layers.0.attn.q_proj.weight"] == "the config says None for 'layers.0'"
    assert reasons["lm_head.weight"] == "the config says None for 'lm_head'"


def test_unselected_weights_are_skipped_with_that_reason() -> None:
    assert skipped(decoder(), {"layers.1": "mxfp4"})["layers.0.attn.q_proj.weight"] == "no key of the config selects it"


def test_unknown_experts_are_skipped_but_not_when_asked_for() -> None:
    experts = {f"layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj")}
    for config in ("mxfp4", {"layers.1": "mxfp4"}, {"linear": "mxfp4", "*": "mxfp8"}):
        reasons = skipped(decoder(), config)
        assert {name for name, reason in reasons.items() if reason.startswith("stacked experts of")} == experts
    assert "the config says None for 'moe'" in skipped(decoder(), {"linear": "mxfp4", "moe": None}).values()
    for key in ("moe", "layers.1.mlp.experts", "layers.1.mlp.experts.gate_up_proj", "*.experts", "*gate_up_proj"):
        with pytest.raises(
            NotImplementedError, match=rf"layers.1.mlp.experts.gate_up_proj .*{key[1:]}.*\(4, 64, 32\): stacked exp"
        ):
            select_weights(decoder(), {"linear": A, key: A})


def test_a_stack_of_matrices_is_experts_whatever_its_class() -> None:
    model = nn.Module()
    model.fc, model.w1 = nn.Linear(32, 32), nn.Parameter(torch.randn(4, 32, 32))
    assert skipped(model, "mxfp4") == {"w1": unknown_experts(model)}


def test_filter_fn_narrows() -> None:
    asked = []

    def keep(module: nn.Module, name: str) -> bool:
        asked.append((type(module), name))
        return name.endswith("q_proj")

    assert set(chosen(decoder(), "mxfp4", keep)) == {"layers.0.attn.q_proj.weight", "layers.1.attn.q_proj.weight"}
    assert skipped(decoder(), "mxfp4", keep)["layers.0.mlp.weight"] == "filter_fn"
    assert (nn.Linear, "lm_head") not in asked
    assert chosen(nn.Linear(32, 32), "mxfp4", lambda module, name: name == "") == {"weight": A}


def tied_decoder() -> Decoder:
    model = decoder()
    model.lm_head.weight = model.embed.weight
    return model


def test_tied_weights_are_one_target() -> None:
    assert skipped(tied_decoder(), "mxfp4")["embed.weight"] == "embedding"
    (target,) = select_weights(tied_decoder(), {"lm_head": A}).targets
    assert [site.name for site in target.sites] == ["embed.weight", "lm_head.weight"]
    assert chosen(tied_decoder(), {"lm_head": "mxfp4", "embed": "mxfp4"}) == {"embed.weight": A}
    assert chosen(tied_decoder(), {"lm_head": "mxfp4", "*embed": "mxfp8"}) == {"embed.weight": A}
    asked_for_linears = chosen(tied_decoder(), {"lm_head": "mxfp4"}, lambda module, _: isinstance(module, nn.Linear))
    assert asked_for_linears == {"embed.weight": A}


@pytest.mark.parametrize("other", ["mxfp8", None])
def test_tied_weights_with_two_configs_are_refused(other: object) -> None:
    with pytest.raises(
        ValueError, match=r"tied weights embed.weight and lm_head.weight .*'embed'.*'lm_head'.*give both"
    ):
        chosen(tied_decoder(), {"lm_head": "mxfp4", "embed": other})


def test_impossible_at_one_tied_module_is_impossible_at_all() -> None:
    model = tied_decoder()
    model.embed.max_norm = 1.0
    with pytest.raises(ValueError, match=r"'lm_head' selects nothing: .*max_norm"):
        chosen(model, {"linear": "mxfp4", "lm_head": "mxfp4"})


def test_a_module_in_two_places_is_one_target() -> None:
    shared = nn.Linear(32, 32)
    (target,) = select_weights(nn.ModuleDict({"a": shared, "b": shared}), {"b": A}).targets
    assert [site.name for site in target.sites] == ["a.weight", "b.weight"]


@pytest.mark.parametrize(
    "config, message",
    [
        ({"liner": "mxfp4"}, "key 'liner' matches no module or parameter; use .*; did you mean 'linear'"),
        ({"linear": "mxfp4", "lm_hed": None}, "'lm_hed' matches no .*; did you mean 'lm_head'"),
        ({"linear": "mxfp4", "*.k_proj": None}, r"'\*.k_proj' matches no module"),
        ({"re:layers": "mxfp4", "re:layer": "mxfp4"}, "'re:layer' matches no"),
        ({"re:(": "mxfp4"}, r"'re:\(' is no regular expression .*: missing \)"),
        ({"layers.0.norm": "mxfp4"}, "'layers.0.norm' selects nothing: it covers no weight; name nn.Linear"),
        ({"layers.0.attn.q_proj.bias": "mxfp4"}, "selects nothing: it covers no weight"),
    ],
    ids=str,
)
def test_keys_without_effect_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(decoder(), config)


@pytest.mark.parametrize("kind", ["linear", "moe"])
@pytest.mark.parametrize("value", ["mxfp4", None])
def test_a_kind_that_the_model_lacks_is_refused(kind: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"'{kind}' is a kind that this model has none of"):
        chosen(nn.Sequential(nn.Embedding(4, 4)), {kind: value})


def test_key_that_covers_only_default_skips_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'linear' selects nothing: it covers lm_head.weight \(output embedding, unless n"
    ):
        chosen(Decoder(), {"linear": "mxfp4"})
    with pytest.raises(ValueError, match=r"the config selects nothing: it covers lm_head.weight \(output embedding"):
        chosen(Decoder(), "mxfp4")
    with pytest.raises(ValueError, match=r"the config selects nothing: this model has neither nn\.Linear"):
        chosen(nn.Sequential(nn.Embedding(4, 4)), "mxfp4")


def test_formats_mix_in_one_model() -> None:
    config = {"linear": "mxfp4", "*.o_proj": "mxfp8", "layers.0.mlp": {"weight": "mxfp6", "activation": None}}
    formats = {name: config for name, config in chosen(decoder(), config).items() if name.startswith("layers.0")}
    assert formats == {
        "layers.0.attn.q_proj.weight": A,
        "layers.0.attn.o_proj.weight": B,
        "layers.0.mlp.weight": MXFP6Config(activation=None),
    }


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Linear(15, 64), nn.Linear(1, 4096)], ids=str)
def test_a_linear_that_fills_no_block_is_skipped_unless_named(layer: nn.Linear) -> None:
    model = nn.ModuleDict({"coefs": layer, "proj": nn.Linear(16, 1)})
    selection = select_weights(model, resolve_mapping("mxfp4"))
    assert [target.name for target in selection.targets] == ["proj.weight"]
    assert [skip.reason for skip in selection.skips] == ["fewer than 16 input features, no format's block"]
    named = select_weights(model, resolve_mapping({"linear": "mxfp4", "coefs": "mxfp8"}))
    assert {target.name: target.config for target in named.targets} == {"coefs.weight": B, "proj.weight": A}


def test_a_small_linear_alone_is_quantized() -> None:
    assert len(select_weights(nn.Linear(4, 4), resolve_mapping("mxfp4")).targets) == 1


def test_only_small_linears_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"selects nothing: it covers 0.weight \(fewer than 16 .*, unless named\)"):
        select_weights(nn.Sequential(nn.Linear(4, 4)), resolve_mapping("mxfp4"))
