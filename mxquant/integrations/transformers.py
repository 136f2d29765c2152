"""transformers: importing this module registers the quantizer "mxquant".

    from mxquant.integrations.transformers import MXQuantConfig
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=MXQuantConfig("mxfp4"))

Once this module is imported, `from_pretrained` alone loads a model that was saved quantized.

    model.set_experts_implementation("mxquant")

This needs `import mxquant` alone. Without this line, a quantized model's experts run under transformers' own
implementations ("grouped_mm", "batched_mm", "eager"), with the same values. `quantize_` does not change a model's
implementation.
"""

from __future__ import annotations

from mxquant.integrations.extra import needing_transformers

with needing_transformers():
    from mxquant.integrations.quantizer import NAME, MXQuantConfig, MXQuantizer

__all__ = ["NAME", "MXQuantConfig", "MXQuantizer"]
