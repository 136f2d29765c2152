"""LoRA adapters (peft) on a base model that was quantized while it was loaded, trained by transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from small_models import snapshot
from small_transformers import IDS, MODELS
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from mxquant import MXTensor, dequantize_
from mxquant.integrations.transformers import MXQuantConfig

EXAMPLES = [{"input_ids": row, "labels": row} for row in IDS]


@pytest.fixture(params=["llama", "mixtral"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    MODELS[request.param]().to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def quantized(plain: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(plain, quantization_config=MXQuantConfig("mxfp4"), **options)


def adapted(base: nn.Module, **options: Any) -> Any:
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options))


def trained(model: Any, folder: Path) -> list[float]:
    """The loss before each of five steps on one batch."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=len(EXAMPLES),
        learning_rate=0.03,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=EXAMPLES)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def codes(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: found[2:] for name, found in snapshot(model).items() if not name.endswith("()") and "lora" not in name
    }


def test_trainer_trains_the_adapter_alone(plain: Path, tmp_path: Path) -> None:
    """The loss of one repeated batch falls (by 0.35 was seen), every byte of the base stays, and
    the adapter, saved by itself, gives the same logits on a base that is quantized anew.
    """
    model = adapted(quantized(plain))
    before = codes(model)
    with torch.no_grad():  # a graph that is kept alive would hold the weights, which the trainer moves
        untrained = model(IDS).logits
    losses = trained(model, tmp_path / "out")
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.2
    assert codes(model) == before
    assert any(isinstance(parameter, MXTensor) for parameter in model.parameters())
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(quantized(plain), tmp_path / "adapter")
    model.eval()
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not torch.equal(untrained, model(IDS).logits)


def test_trainer_refuses_a_quantized_model_without_an_adapter(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trained(quantized(plain), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_preparing_for_kbit_training_keeps_the_codes(plain: Path, dtype: torch.dtype) -> None:
    """peft casts what is bf16 to fp32 by assigning `data`; codes stand for fp32 values then."""
    wide = peft.prepare_model_for_kbit_training(quantized(plain, dtype=dtype))
    for name, parameter in quantized(plain).named_parameters():
        if isinstance(parameter, MXTensor):
            assert torch.equal(wide.get_parameter(name).qdata, parameter.qdata)
            assert wide.get_parameter(name).dtype == torch.float32
    model = adapted(wide)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    model(IDS, labels=IDS).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients
    assert all("lora" in name and bool(gradient.isfinite().all()) for name, gradient in gradients.items())


def test_merging_needs_ordinary_weights(plain: Path) -> None:
    """Into packed codes it is refused and changes nothing; into the dequantized base it is exact to fp32's rounding of
    sums (1e-5 of the norm would be ten times what was seen).
    """
    model = adapted(
        AutoModelForCausalLM.from_pretrained(
            plain,
            quantization_config=MXQuantConfig({"linear": {"weight": "mxfp4", "activation": None}}),
            dtype=torch.float32,
        ),
        init_lora_weights=False,
    ).eval()
    expected = model(IDS).logits
    with pytest.raises(NotImplementedError, match=r"mxquant\.dequantize_\(model\)"):
        model.merge_adapter()
    assert torch.equal(model(IDS).logits, expected)
    dequantize_(model)
    merged = model.merge_and_unload()
    assert (merged(IDS).logits - expected).norm() < 1e-5 * expected.norm()
    assert not any("lora" in name for name, _ in merged.named_parameters())
