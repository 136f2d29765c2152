"""Quantize PyTorch models to MXFP4, MXFP6, MXFP8 and NVFP4 in place, and run them on any machine.

from mxquant import quantize_, MXFP4Config

quantize_(model, MXFP4Config())
"""

from importlib.metadata import PackageNotFoundError, version

from mxquant.api import dequantize_, quantize_, summary
from mxquant.backends import list_backends, register_backend
from mxquant.checkpoints import load_state, save_state
from mxquant.config import GPTQ, MXFP4Config, MXFP6Config, MXFP8Config, NVFP4Config, mxfp4, mxfp6, mxfp8, nvfp4
from mxquant.explanation import explain
from mxquant.integrations import experts_implementation as _experts  # registers it with transformers
from mxquant.integrations import peft as _peft  # refuses adapters that cannot work when they are attached
from mxquant.integrations import torchao as _torchao  # registers the configs with torchao
from mxquant.integrations.pretrained import from_pretrained
from mxquant.integrations.saving import save_pretrained
from mxquant.modules.experts_layouts import register_experts_layout
from mxquant.modules.moe import experts_forward
from mxquant.tensor import EmulatedMXTensor, MXTensor, flatten_state_dict, quantize, unflatten_state_dict
from mxquant.tuning import tune

__all__ = [
    # Models
    "quantize_",
    "dequantize_",
    "explain",
    "summary",
    # Configs
    "MXFP4Config",
    "MXFP6Config",
    "MXFP8Config",
    "NVFP4Config",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nvfp4",
    "GPTQ",
    # Tensors
    "quantize",
    "MXTensor",
    "EmulatedMXTensor",
    "flatten_state_dict",
    "unflatten_state_dict",
    # Checkpoints
    "from_pretrained",
    "load_state",
    "save_pretrained",
    "save_state",
    # Backends
    "register_backend",
    "list_backends",
    "tune",
    # Mixture-of-experts blocks
    "register_experts_layout",
    "experts_forward",
    "__version__",
]

try:
    __version__ = version("mxquant")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"
