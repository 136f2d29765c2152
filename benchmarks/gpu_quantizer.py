"""How fast are tensors quantized on a GPU, against a copy and against torchao's compiled `to_mx`?

Not a script: `gpu_linear.py` measures it in the same run.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_timing import copies
from peers import described
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import to_mx

from mxquant import quantize
from mxquant.tuning import graph_microseconds

COLUMNS = 8192
ROWS = (1, 16, 2048, 8192)
# Few rows come from the cache, as they do in a model.
MOST_INPUTS = 100
FORMATS = {"mxfp4": torch.float4_e2m1fn_x2, "mxfp6_e2m3": None, "mxfp8_e4m3": torch.float8_e4m3fn, "nvfp4": None}
"""The formats measured, with torchao's name of those that it compiles."""

compiled_to_mx = torch.compile(to_mx, dynamic=False, fullgraph=True)


def measure_quantizer(device: str) -> Iterator[dict[str, Any]]:
    """A result for each format and number of rows. torchao rounds scales down (`floor`), we as our defaults say."""
    for rows in ROWS:
        x = torch.randn(rows, COLUMNS, device=device, dtype=torch.bfloat16)
        inputs = [x.clone() for _ in range(min(MOST_INPUTS, copies(x.nbytes)))]
        target = torch.empty_like(x)
        copied = 2 * x.nbytes / each(target.copy_, inputs)
        for name, element in FORMATS.items():
            taken = each(partial(quantize, format=name), inputs)
            rate = (x.nbytes + quantize(x, name).nbytes) / taken
            row = {"quantize": name, "rows": rows, "columns": COLUMNS, "us": round(taken, 2)}
            row |= {"tb_s": round(rate / 1e6, 3), "of_copy": round(rate / copied, 3)}
            if name != "nvfp4":  # whose per-tensor scale is of rotated values: they are made first
                rotated = each(partial(quantize, format=name, rotation=32), inputs)
                row |= {"rotated_us": round(rotated, 2)}
            yield row if element is None else row | torchao(element, inputs)


def torchao(element: torch.dtype, inputs: list[Tensor]) -> dict[str, Any]:
    try:
        return {"torchao_us": round(each(lambda x: compiled_to_mx(x, element, 32), inputs), 2)}
    except Exception as error:
        return {"torchao_failed": described(error)}


def each(call: Callable[[Tensor], object], inputs: list[Tensor]) -> float:
    """Microseconds a call, the inputs taken in turn."""
    return graph_microseconds(lambda: [call(x) for x in inputs], len(inputs))
