"""What loading takes: the quantized model and one parameter's parts, however many experts are merged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("transformers")

from checkpoints.test_damaged import QUARK
from transformers import MixtralConfig, MixtralForCausalLM

from mxquant import from_pretrained, load_state

HIDDEN, INNER, EXPERTS = 512, 1024, 8
MEGABYTE = 2**20

SCRIPT = """
import sys
import mxquant.integrations.transformers
from mxquant import MXTensor, from_pretrained

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

from_pretrained(sys.argv[1])
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts anew
model = from_pretrained(sys.argv[2])
for parameter in model.parameters():
    for inner in parameter.operand if isinstance(parameter, MXTensor) else (parameter.detach(),):
        if inner is not None:
            inner.max()
sizes = [parameter.nbytes for parameter in model.parameters()]
print(sum(sizes), max(sizes), status("VmHWM") - before)
"""


def mixtral(folder: Path, layers: int, hidden: int, inner: int) -> Path:
    """A Quark checkpoint with one tensor an expert and projection."""
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        num_local_experts=EXPERTS,
        architectures=["MixtralForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        expected = MixtralForCausalLM(config).state_dict()
    tensors: dict[str, Tensor] = {}

    def put(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)

    for name, parameter in expected.items():
        if "_proj.weight" in name:
            put(name.removesuffix(".weight"), *parameter.shape)
        elif ".experts." not in name:
            tensors[name] = torch.zeros(parameter.shape, dtype=torch.bfloat16)
    for layer in range(layers):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            for projection, sizes in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
                put(f"{prefix}.{projection}_proj", *sizes)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": QUARK}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_of_merging_experts_is_the_model_and_one_stack(tmp_path: Path) -> None:
    """Of 12 layers. One stack is there as parts, as two halves and whole; 24 MB are the skeleton, the allocator's and
    the first pages of each tensor. Were sources kept, the peak would be 80 MB higher.
    """
    small, large = mixtral(tmp_path / "small", 1, 64, 64), mixtral(tmp_path / "large", 12, HIDDEN, INNER)
    command = [sys.executable, "-c", SCRIPT, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    total, largest, peak = map(int, done.stdout.split()[-3:])
    assert total > 75 * MEGABYTE
    assert peak < total + 3 * largest + 24 * MEGABYTE


def test_merged_experts_have_the_files_values(tmp_path: Path) -> None:
    """The control: it is this model that was measured."""
    folder = mixtral(tmp_path / "small", 1, 64, 64)
    state, model = load_state(folder), from_pretrained(folder, device_map={"": "cpu"})
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    for expert in range(EXPERTS):
        for half, projection in enumerate(("gate", "up")):
            part = state[f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight"].dequantize()
            assert torch.equal(stack.dequantize()[expert].chunk(2)[half], part)
