"""The experts implementation "mxquant", and experts that are compiled, without an import of mxquant's integration."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

MODEL = """
import torch
torch.manual_seed(0)
config = transformers.Qwen3MoeConfig(
    vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96 {options}
)
model = transformers.Qwen3MoeForCausalLM(config).eval()
mxquant.quantize_(model, "mxfp4")
ids = torch.randint(0, 128, (2, 8))
assert "mxquant.integrations.transformers" not in __import__("sys").modules
with torch.no_grad():
    y = model(ids, use_cache=False).logits
"""
EXPORT = """    z = torch.export.export(model, (ids,), {"use_cache": False}).module()(ids, use_cache=False).logits
    assert torch.equal(y, z)
"""
COMPILE = """    z = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    assert (y - z).norm() < 1e-5 * y.norm()
"""
TOLD = ', experts_implementation="mxquant"'


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("body", [EXPORT, COMPILE], ids=["export", "compile"])
@pytest.mark.parametrize("options", ["", TOLD], ids=["default", "mxquant"])
def test_quantized_experts_are_compiled_and_exported(options: str, body: str) -> None:
    run("import mxquant, transformers\n" + MODEL.format(options=options) + body)


@pytest.mark.parametrize(
    "imports",
    [
        "import mxquant, transformers",
        "import transformers, mxquant",
        "import transformers.models.qwen3_moe.modeling_qwen3_moe, mxquant",
    ],
)
def test_a_config_names_the_implementation_in_either_import_order(imports: str) -> None:
    check = "    assert model.config._experts_implementation == 'mxquant'\n"
    run(imports + "\n" + MODEL.format(options=TOLD) + check)


def test_importing_mxquant_imports_no_transformers() -> None:
    run("import sys, mxquant\nassert 'transformers' not in sys.modules")
