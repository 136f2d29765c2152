"""transformers: importing this module registers the quantizer and the experts implementation "mxquant".

    from mxquant.integrations.transformers import MXQuantConfig
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=MXQuantConfig("mxfp4"))

Once this module is imported, `from_pretrained` alone loads a model that was saved quantized.

    import mxquant.integrations.transformers
    model.set_experts_implementation("mxquant")

Without this line, a quantized model's experts run under transformers' own implementations ("grouped_mm", "batched_mm",
"eager"), with the same values. `quantize_` does not change a model's implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxquant.integrations.extra import needing_transformers
from mxquant.modules.moe import experts_forward
from mxquant.tensor import MXTensor
from mxquant.tensor.dispatch import implements
from mxquant.tensor.grouped import grouped_mm

with needing_transformers():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from mxquant.integrations.quantizer import NAME, MXQuantConfig, MXQuantizer

__all__ = ["NAME", "MXQuantConfig", "MXQuantizer"]


def _experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`mxquant.experts_forward` for blocks with quantized weights, transformers' grouped matmul for others."""
    if any(isinstance(parameter, MXTensor) for parameter in self._parameters.values()):
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


@implements(torch.ops.transformers.grouped_mm_fallback.default)
def _grouped_mm_fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """transformers' "grouped_mm" calls this operator when it is compiled with other dtypes than bf16."""
    return grouped_mm(input, weight, offs)
