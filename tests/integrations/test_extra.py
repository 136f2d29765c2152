"""Without transformers mxquant is imported as ever, and what needs it says how to install it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["transformers"] = None  # what an import finds where it is not installed
import torch
import mxquant
from mxquant.integrations.streaming import quantize_checkpoint
calls = [
    lambda: mxquant.from_pretrained("."),
    lambda: mxquant.save_pretrained(torch.nn.Linear(2, 2), "saved"),
    lambda: quantize_checkpoint(".", "saved", "mxfp4"),
    lambda: __import__("mxquant.integrations.transformers"),
]
for call in calls:
    try:
        call()
    except ImportError as error:
        assert "transformers 5.17 or newer" in str(error) and "'mxquant[transformers]'" in str(error), error
        print("named")
"""


def test_import_error_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.split() == ["named"] * 4, done.stderr
