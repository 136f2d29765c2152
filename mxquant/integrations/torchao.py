"""`torchao.quantization.quantize_` with mxquant's configs: importing this module registers them.

torchao walks the model itself and hands over one module at a time, so its rules hold: its filter decides which modules
(by default every `nn.Linear`, output embeddings and routers included), the first weights are changed before the last
are validated, and tied weights come apart. `mxquant.quantize_` does better at each.
"""

from __future__ import annotations

from torch import nn
from torchao.quantization.transform_module import register_quantize_module_handler

from mxquant.api import replace_weight
from mxquant.config import MXFP4Config, MXFP6Config, MXFP8Config, NVFP4Config, _MXConfig
from mxquant.select import Site, Target
from mxquant.validate import check_weight


def _quantize_module(module: nn.Module, config: _MXConfig) -> nn.Module:
    """Quantize the weight of one module that torchao's filter let pass.

    Raises:
        ValueError, TypeError, NotImplementedError: as `mxquant.quantize_`.
    """
    weight = module._parameters.get("weight")
    if not isinstance(module, (nn.Linear, nn.Embedding)) or weight is None:
        raise ValueError(
            f"{type(module).__name__} cannot be quantized, only nn.Linear and nn.Embedding can; "
            "give torchao's quantize_ a filter_fn that lets only these pass"
        )
    name = f"weight of {module}"
    if config.gptq is not None:
        raise ValueError(
            f"{name}: torchao hands over one module at a time, without data to calibrate on; call mxquant.quantize_ "
            'with calibration=batches, or leave algorithm="rtn"'
        )
    check_weight(name, weight, config)
    replace_weight(Target((Site(module, "", "weight", weight),), config))
    return module


for _config in (MXFP4Config, MXFP6Config, MXFP8Config, NVFP4Config):
    register_quantize_module_handler(_config)(_quantize_module)
