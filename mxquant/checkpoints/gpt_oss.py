"""gpt-oss: experts as `*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32], weight-only MXFP4.

Two layouts. transformers': `mlp.experts.gate_up_proj_blocks`, of a parameter that is [E, K, N]. OpenAI's own:
`mlp.mlp1_weight.blocks`, of [E, N, K]. Rows of gates and ups alternate in both, and so do their biases.
`gpt_oss_original` has the rest of OpenAI's.

Sources: transformers `integrations/mxfp4.py`, `convert_gpt_oss_weights_to_hf.py`; gpt-oss `torch/weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from mxquant.checkpoints.files import Checkpoint
from mxquant.checkpoints.gpt_oss_original import as_in_transformers
from mxquant.checkpoints.producer import Reading, check_not_rotated, refuse
from mxquant.checkpoints.weight_spec import BLOCKS, WeightSpec
from mxquant.tensor import MXTensor

_BLOCK = 32
_LAYOUTS = (("_blocks", "_scales", -2), (".blocks", ".scales", -1))


class GptOss:
    name = "gpt-oss"
    by_modules = False

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = checkpoint.quantization_config.get("quant_method")
        original = any(name.endswith("_weight.blocks") for name in checkpoint.tensors)
        return method == "mxfp4" or (method is None and original)

    def read(self, checkpoint: Checkpoint) -> Reading:
        stored = []
        for blocks, scales, axis in _LAYOUTS:
            for name in checkpoint.tensors:
                if name.endswith(blocks):
                    weight = name.removesuffix(blocks)
                    stored.append(
                        WeightSpec(
                            name=weight,
                            format="mxfp4",
                            qdata=name,
                            scale=f"{weight}{scales}",
                            axis=axis,
                            arrangement=BLOCKS,
                        )
                    )
        is_original = bool(stored) and all(weight.axis == -1 for weight in stored)
        if not is_original or "model_type" in checkpoint.config:
            return Reading(stored)
        return Reading(stored, layout=lambda: as_in_transformers(checkpoint, stored))

    def activation_scale_mode(self, activation: str) -> str | None:
        return None

    def encode(self, name: str, weight: MXTensor, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if weight.format != "mxfp4":
            refuse(self.name, name, weight, "its codes", "quantize it to mxfp4, or save as 'mxquant'")
        check_not_rotated(self.name, name, weight)
        if weight.activation is not None:
            refuse(
                self.name,
                name,
                weight,
                f"the quantization of activations to {weight.activation}",
                "make it weight-only (activation=None), or save as 'mxquant'",
            )
        if weight.dim() != 3 or weight.axis != -2 or weight.shape[-2] % _BLOCK or weight.metadata.block_offset:
            refuse(
                self.name,
                name,
                weight,
                "whatever is no stack of experts [E, K, N] of whole blocks along K",
                "quantize the experts alone ({'moe': 'mxfp4'}), or save as 'mxquant'",
            )
        canonical = weight.canonical()
        blocks = canonical.qdata.unflatten(-1, (-1, 16))
        return {f"{name}_blocks": blocks, f"{name}_scales": canonical.scale}

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {"config.json": {"quant_method": "mxfp4", "modules_to_not_convert": sorted(ordinary)}}
