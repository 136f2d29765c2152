"""`torchao.quantization.quantize_` with mxquant's configs: importing this module registers them.

torchao walks the model itself and hands over one module at a time. So its filter decides which modules (by default
every `nn.Linear`, output embeddings and routers included), the first weights are changed before the last are validated,
and tied weights come apart. `mxquant.quantize_` validates first, keeps ties, and skips output embeddings and routers.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torchao.quantization.transform_module import register_quantize_module_handler

from mxquant.config import MXConfig, MXFP4Config, MXFP6Config, MXFP8Config, NVFP4Config
from mxquant.modules.quantize_target import Target, check_target, quantize_target
from mxquant.modules.sites import find_sites


def _quantize_module(module: nn.Module, config: MXConfig) -> nn.Module:
    """Quantize the weight of one module that torchao's filter let pass. It raises what `mxquant.quantize_` does."""
    name = str(module)  # the only name that is known here
    sites = [site for group in find_sites(module) for site in group if site.module is module]
    site = next((site for site in sites if site.kind in ("linear", "embedding")), None)
    if site is None or site.impossible:
        why = f" ({site.impossible})" if site else ", only nn.Linear, transformers' Conv1D and nn.Embedding can"
        raise ValueError(f"{name} cannot be quantized{why}; give torchao's quantize_ a filter_fn that leaves it out")
    target = Target((replace(site, module_name=name),), config)
    if config.gptq is not None:
        raise ValueError(
            f"{target.name}: torchao hands over one module at a time, without data to calibrate on; call "
            'mxquant.quantize_ with calibration=batches, or leave algorithm="rtn"'
        )
    check_target(target)
    quantize_target(target)
    return module


for _config in (MXFP4Config, MXFP6Config, MXFP8Config, NVFP4Config):
    register_quantize_module_handler(_config)(_quantize_module)
