"""gpt-oss: experts as `*_blocks` [E, N, K / 32, 16] and `*_scales` [E, N, K / 32], weight-only MXFP4.

There are two layouts. transformers has `mlp.experts.gate_up_proj_blocks`, of a parameter [E, K, N]. OpenAI has
`mlp.mlp1_weight.blocks`, of a parameter [E, N, K]; `gpt_oss_original` renames its tensors. In both, rows of the gate
and up projections alternate, and so do their biases.

Sources: transformers `integrations/mxfp4.py`, `convert_gpt_oss_weights_to_hf.py`; gpt-oss `torch/weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from mxquant.checkpoints.files import CONFIG, Checkpoint, Documents
from mxquant.checkpoints.gpt_oss_original import as_in_transformers
from mxquant.checkpoints.producer import Producer, Reading
from mxquant.checkpoints.weight_spec import WeightSpec
from mxquant.scheme import Scheme
from mxquant.tensor import MXTensor

_BLOCK = 32
_LAYOUTS = (("_blocks", "_scales", -2), (".blocks", ".scales", -1))


class GptOss(Producer):
    name = "gpt-oss"
    suffixes = ("_blocks", ".blocks", "_scales", ".scales")

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        method = checkpoint.quantization_config.get("quant_method")
        original = any(name.endswith("_weight.blocks") for name in checkpoint.tensors)
        return method == "mxfp4" or (method is None and original)

    def read(self, checkpoint: Checkpoint) -> Reading:
        quantized = [
            WeightSpec(
                name=(weight := name.removesuffix(blocks)),
                scheme=Scheme("mxfp4"),
                qdata=name,
                scale=f"{weight}{scales}",
                axis=axis,
                qdata_is_in_blocks=True,
            )
            for blocks, scales, axis in _LAYOUTS
            for name in checkpoint.tensors
            if name.endswith(blocks)
        ]
        is_original = bool(quantized) and all(weight.axis == -1 for weight in quantized)
        if not is_original or "model_type" in checkpoint.config:
            return Reading(quantized)
        return Reading(quantized, model_layout=lambda weights: as_in_transformers(checkpoint, weights))

    def encode(self, name: str, weight: MXTensor, stored_scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if weight.format != "mxfp4":
            self.refuse(name, weight, "its codes", "quantize it to mxfp4")
        self.check_not_rotated(name, weight)
        if weight.activation is not None:
            lost = f"the quantization of activations to {weight.activation}"
            self.refuse(name, weight, lost, "make it weight-only (activation=None)")
        if weight.dim() != 3 or weight.axis != -2 or weight.shape[-2] % _BLOCK or weight.metadata.block_offset:
            lost = "whatever is no stack of experts [E, K, N] of whole blocks along K"
            self.refuse(name, weight, lost, "quantize the experts alone ({'moe': 'mxfp4'})")
        canonical = weight.canonical()
        blocks = canonical.qdata.unflatten(-1, (-1, 16))
        return {f"{name}_blocks": blocks, f"{name}_scales": canonical.scale}

    def config(self, weights: Mapping[str, MXTensor], ordinary: Iterable[str]) -> Documents:
        return {CONFIG: {"quant_method": "mxfp4", "modules_to_not_convert": sorted(ordinary)}}
