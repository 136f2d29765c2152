"""Tensor parallel loads: shards with the bytes of the whole weight's, or a refusal before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from small_transformers import IDS, MODELS, SMALL
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

from mxquant import MXTensor
from mxquant.integrations.transformers import MXQuantConfig

ATTENTION, MLP = ("self_attn.q_proj", "self_attn.o_proj"), ("mlp.up_proj", "mlp.down_proj")


each_rank = pytest.mark.parametrize("rank", [0, 1])


def saved(folder: Path, **sizes: int) -> Path:
    LlamaForCausalLM(LlamaConfig(**SMALL | sizes)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, config: object = None, *, rank: int | None = None, **plan: Any) -> Any:
    """The model; with `rank` as that process of two has it. Loading needs no collectives, which a fake group lacks."""
    kwargs = {} if config is None else {"quantization_config": MXQuantConfig(config)}
    if rank is None:
        return AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        distributed_config = DistributedConfig(tp_size=2, **plan)
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed_config, **kwargs)
    finally:
        dist.destroy_process_group()


def assert_shards_of_whole(model: Any, whole: Any, rank: int, names: tuple[str, ...]) -> None:
    for name in names:
        weight = model.model.layers[0].get_submodule(name).weight
        expected = whole.model.layers[0].get_submodule(name).weight
        (placement,) = weight.placements
        shard, local = expected.chunk(2, placement.dim)[rank], weight.to_local()
        assert isinstance(local, MXTensor)
        assert local.metadata == shard.metadata
        assert torch.equal(local, shard)


@each_rank
@pytest.mark.parametrize("config", ["mxfp4", "mxfp8", {"linear": {"weight": "mxfp6", "activation": None}}])
def test_mx_shards_on_block_borders_have_the_bytes_of_the_whole(rank: int, config: object, tmp_path: Path) -> None:
    folder = saved(tmp_path, intermediate_size=128)
    whole, model = load(folder, config), load(folder, config, rank=rank)
    assert_shards_of_whole(model, whole, rank, ATTENTION + MLP)
    assert not model._state_dict_pre_hooks


@each_rank
def test_rotated_shards_on_block_borders_have_the_bytes_of_the_whole(rank: int, tmp_path: Path) -> None:
    folder, config = saved(tmp_path, intermediate_size=128), {"linear": {"weight": "mxfp4", "rotation": 32}}
    whole, model = load(folder, config), load(folder, config, rank=rank)
    assert_shards_of_whole(model, whole, rank, ATTENTION + MLP)


@each_rank
def test_last_block_of_the_last_shard_may_be_partial(rank: int, tmp_path: Path) -> None:
    """127 input features are cut after 64."""
    folder = saved(tmp_path, intermediate_size=127)
    whole, model = load(folder, "mxfp4"), load(folder, "mxfp4", rank=rank)
    assert_shards_of_whole(model, whole, rank, MLP)


@each_rank
@pytest.mark.parametrize("size, piece", [(96, 48), (120, 60), (40, 20)])
def test_mx_shards_off_block_borders_are_refused(rank: int, size: int, piece: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, intermediate_size=size)
    with pytest.raises(ValueError, match=rf"down_proj.weight .*2 pieces of {piece}.* blocks of 32.* multiple of 64"):
        load(folder, "mxfp4", rank=rank)
    model = load(folder, {"linear": "mxfp4", "*.down_proj": None}, rank=rank)
    assert not isinstance(model.model.layers[0].mlp.down_proj.weight.to_local(), MXTensor)


@each_rank
def test_a_refused_load_reads_no_weight(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.distributed.sharding_utils import DtensorShardOperation

    folder, read = saved(tmp_path, intermediate_size=96), []
    monkeypatch.setattr(DtensorShardOperation, "shard_tensor", lambda *a, **k: read.append(a))
    with pytest.raises(ValueError, match="multiple of 64"):
        load(folder, "mxfp4", rank=rank)
    assert not read


@each_rank
def test_nvfp4_shards_are_refused(rank: int, tmp_path: Path) -> None:
    """Each process would find a per-tensor scale of its own."""
    with pytest.raises(NotImplementedError, match=r'q_proj.weight .*scale of the whole weight.*"mxfp4"'):
        load(saved(tmp_path, intermediate_size=128), "nvfp4", rank=rank)


@each_rank
@pytest.mark.parametrize("activation", ["nvfp4", "fp8_e4m3"])
def test_activations_with_one_scale_a_row_are_refused_where_rows_are_sharded(
    rank: int, activation: str, tmp_path: Path
) -> None:
    folder, scheme = saved(tmp_path, intermediate_size=128), {"weight": "mxfp4", "activation": activation}
    with pytest.raises(ValueError, match=f"o_proj.weight .*one scale in {activation}"):
        load(folder, {"linear": scheme}, rank=rank)
    columns = {"linear": scheme, "*.o_proj": "mxfp4", "*.down_proj": None}
    whole, model = load(folder, columns), load(folder, columns, rank=rank)
    assert_shards_of_whole(model, whole, rank, ATTENTION)


@each_rank
def test_saved_codes_are_not_loaded_in_shards(rank: int, tmp_path: Path) -> None:
    load(saved(tmp_path / "plain", intermediate_size=128), "mxfp4").save_pretrained(tmp_path / "mx")
    with pytest.raises(NotImplementedError, match=r"_proj\.weight was saved quantized"):
        load(tmp_path / "mx", rank=rank)
    assert isinstance(load(tmp_path / "mx").model.layers[0].mlp.up_proj.weight, MXTensor)


EXPERTS = "model.layers.*.mlp.experts"


def test_experts_shared_out_whole_keep_their_own_nvfp4_scales(tmp_path: Path) -> None:
    # NOTE: one rank alone. torch remembers where shards begin by mesh and shape: ranks in one process would share it.
    rank = 1
    MODELS["mixtral"]().to(torch.bfloat16).save_pretrained(tmp_path)
    plan = {f"{EXPERTS}.gate_up_proj": "grouped_gemm", f"{EXPERTS}.down_proj": "grouped_gemm"}
    whole, model = load(tmp_path, {"moe": "nvfp4"}), load(tmp_path, {"moe": "nvfp4"}, rank=rank, tp_plan=plan)
    for name in ("gate_up_proj", "down_proj"):
        local = getattr(model.model.layers[0].mlp.experts, name).to_local()
        assert torch.equal(local, getattr(whole.model.layers[0].mlp.experts, name).chunk(2)[rank])


@each_rank
def test_mx_experts_sharded_inside_have_the_bytes_of_the_whole(rank: int, tmp_path: Path) -> None:
    """A process has its half of the gates and its half of the ups."""
    config = MixtralConfig(**SMALL | {"intermediate_size": 128}, num_local_experts=4)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    whole, model = load(tmp_path, {"moe": "mxfp4"}), load(tmp_path, {"moe": "mxfp4"}, rank=rank)
    ours, theirs = (m.model.layers[0].mlp.experts for m in (model, whole))
    halves = [part.chunk(2, 1)[rank] for part in theirs.gate_up_proj.chunk(2, 1)]
    assert torch.equal(ours.gate_up_proj.to_local(), torch.cat(halves, 1))
    assert torch.equal(ours.down_proj.to_local(), theirs.down_proj.chunk(2, 2)[rank])


def logits_of_process(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    config = {"linear": {"weight": "mxfp4", "activation": None}}
    kwargs: dict[str, Any] = {"quantization_config": MXQuantConfig(config), "dtype": torch.float32}
    plan = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan, **kwargs)
    whole = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.dist
def test_two_processes_give_the_logits_of_one(tmp_path: Path) -> None:
    saved(tmp_path, intermediate_size=128)
    torch.multiprocessing.spawn(logits_of_process, (tmp_path,), nprocs=2)
