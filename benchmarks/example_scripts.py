"""The scripts of the folder `examples` as modules: they are no package, so they are loaded by their path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no example {name!r}: expected examples/{name}.py beside benchmarks/")
    if str(path.parent) not in sys.path:  # some import from their neighbours
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
