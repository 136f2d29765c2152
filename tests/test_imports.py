"""The shape of the package: imports go one way, importing it is cheap, and no file or function outgrows its purpose."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mxquant"

# What each part of the package may import beside itself, in the order
#     formats <- reference <- kernels <- ops <- backends <- tensor <- modules <- algorithms <- api;
# `scheme` and `config` are leaves that all but the lowest layers may read. The folders in kernels/ are parts, too:
#     primitives, runtime <- quantize, moe <- mxfp4_sm90.
# Outside, "kernels" stands for all of them; to these folders it is what its `__init__` holds.
BELOW_KERNELS = {"formats", "reference", "kernels", "kernels.primitives", "kernels.runtime"}
BELOW_TENSOR = {"formats", "reference", "kernels", "ops", "scheme", "backends"}
BELOW_MODULES = BELOW_TENSOR | {"tensor", "config", "config_hints"}
BELOW_ALGORITHMS = BELOW_MODULES | {"modules", "select"}
BELOW_API = BELOW_ALGORITHMS | {"algorithms", "report"}
ALLOWED = {
    "formats": set(),
    "scheme": {"formats"},
    "config_hints": {"formats"},
    "config": {"formats", "scheme", "config_hints"},
    "reference": {"formats"},
    "kernels": set(),
    "kernels.primitives": {"formats"},
    "kernels.runtime": set(),
    "kernels.quantize": BELOW_KERNELS,
    "kernels.moe": BELOW_KERNELS,
    "kernels.mxfp4_sm90": BELOW_KERNELS | {"kernels.moe"},
    "ops": {"formats", "reference", "kernels"},
    "backends": {"formats", "reference", "kernels", "ops", "scheme"},
    "tensor": BELOW_TENSOR,
    "modules": BELOW_MODULES,
    "select": BELOW_MODULES | {"modules"},
    "tables": set(),
    "algorithms": BELOW_ALGORITHMS | {"tables"},
    "report": {"formats", "scheme", "tensor", "modules", "tables"},
    "explanation": BELOW_MODULES | {"tables"},
    "tuning": BELOW_MODULES | {"tables"},
    "checkpoints": {"formats", "scheme", "backends", "tensor"},
    "api": BELOW_API,
    "integrations": BELOW_API | {"api", "checkpoints"},
    "__init__": BELOW_API | {"api", "explanation", "tuning", "checkpoints", "integrations"},
    "cli": BELOW_API | {"explanation", "tables", "checkpoints", "integrations"},
    "__main__": {"cli"},
}

# Loaded on demand only. torch and torchao load some of these themselves; what counts is what mxquant adds.
HEAVY = {"triton", "transformers", "accelerate", "rich", "tqdm", "matplotlib", "numpy", "pandas", "safetensors"}
OPTIONAL = HEAVY | {"filelock"}
"""What a function may import: these, and modules of the package that import one of these at their top."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 9
MAX_LONG_SIGNATURES = 5
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = MODULES + sorted(
    path for folder in ("tests", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PATHS = {module_of(path): path for path in MODULES}


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: a file or folder in it, or a folder in `kernels`."""
    _, *rest = module.split(".")
    if rest[:1] == ["kernels"] and len(rest) > 1:
        return ".".join(rest[:2])
    return rest[0] if rest else "__init__"


class Import(NamedTuple):
    line: int
    module: str
    is_late: bool
    """Whether it stands in a function."""


def imports_of(tree: ast.AST, is_late: bool = False) -> Iterator[Import]:
    """Each import, wherever it stands; what is imported from a module counts as an import of that module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, is_late)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "ruff allows no relative import"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield Import(node.lineno, inner if inner in PATHS else module, is_late)
        else:
            yield from imports_of(node, is_late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@functools.cache
def imports_in(module: str) -> tuple[Import, ...]:
    return tuple(imports_of(ast.parse(PATHS[module].read_text())))


def may_import(part: str, other: str) -> bool:
    if part == other or other in ALLOWED[part]:
        return True
    return other.startswith("kernels.") and "kernels" in ALLOWED[part] and not part.startswith("kernels.")


def misdirected_imports(source: str, part: str) -> list[str]:
    """Imports that go the wrong way, wherever they stand: a late one counts like one at the top."""
    return [
        f"line {one.line}: {part} imports {one.module}"
        for one in imports_of(ast.parse(source))
        if one.module.split(".")[0] == "mxquant" and not may_import(part, part_of(one.module))
    ]


@functools.cache
def needs_optional(module: str) -> bool:
    """Whether importing a module imports an optional package: the module itself, or what it imports at its top."""
    if module not in PATHS:
        return module.split(".")[0] in OPTIONAL
    return any(needs_optional(one.module) for one in imports_in(module) if not one.is_late)


def import_graph() -> dict[str, set[str]]:
    """The modules that each module imports, in functions too."""
    return {module: {one.module for one in imports_in(module) if one.module in PATHS} for module in PATHS}


def is_entry_point(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a kernel, which carries the package's name in profiles, or a registered operator."""
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    is_kernel = "jit" in decorators and function.name.startswith("mxquant_")
    return is_kernel or "custom_op" in decorators or "register_fake" in decorators


def long_signatures(source: str) -> list[str]:
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    counts = {
        f"{node.name} (line {node.lineno})": len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        for node in functions
        if not is_entry_point(node)
    }
    return [f"{name}: {count} parameters" for name, count in counts.items() if count > MAX_PARAMETERS]


def long_functions(source: str) -> list[str]:
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {f"{node.name} (line {node.lineno})": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(module_of(path))
    assert part in ALLOWED, f"{relative(path)}: say in ALLOWED what the new part {part!r} may import"
    assert not misdirected_imports(path.read_text(), part)


@pytest.mark.parametrize(
    "source",
    [
        "import mxquant.api",
        "from mxquant.tensor import MXTensor",
        "from mxquant import api",
        "import mxquant",
        "def late():\n    from mxquant.backends.registry import select_backend",
    ],
)
def test_a_wrong_import_is_noticed(source: str) -> None:
    assert misdirected_imports(source, "formats")


def test_config_imports_only_formats_scheme_and_its_hints() -> None:
    """A config is made before anything is quantized, and by code that has no tensor."""
    allowed = {"mxquant.formats.spec", "mxquant.scheme", "mxquant.config_hints"}
    for name in ("config.py", "config_hints.py"):
        tree = ast.parse((PACKAGE / name).read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert {module for module in modules if module.startswith("mxquant")} <= allowed


@pytest.mark.parametrize(
    "part, source",
    [
        ("kernels.primitives", "import mxquant.kernels.runtime.launch"),
        ("kernels.moe", "from mxquant.kernels.quantize import strided"),
        ("kernels.quantize", "from mxquant import ops"),
    ],
)
def test_a_wrong_import_inside_kernels_is_noticed(part: str, source: str) -> None:
    assert misdirected_imports(source, part)


def test_no_module_imports_itself_by_way_of_others() -> None:
    graphlib.TopologicalSorter(import_graph()).prepare()


def test_a_circle_is_noticed() -> None:
    graph = import_graph() | {
        "mxquant.formats.table": {"mxquant.formats.spec"},
        "mxquant.formats.spec": {"mxquant.ops"},
    }
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", PATHS)
def test_functions_import_only_what_is_optional(module: str) -> None:
    assert [one for one in imports_in(module) if one.is_late and not needs_optional(one.module)] == []


def test_which_modules_need_what_is_optional() -> None:
    for module in ("triton", "mxquant.kernels.quantize.strided"):
        assert needs_optional(module)
    for module in ("torch", "mxquant.kernels", "mxquant.ops", "mxquant.tensor.construct"):
        assert not needs_optional(module)


def test_few_functions_have_many_parameters() -> None:
    """Kernels and registered operators aside, whose parameters can only be listed."""
    sources = {relative(path): path.read_text() for path in MODULES}
    found = {name: signatures for name, source in sources.items() if (signatures := long_signatures(source))}
    assert sum(map(len, found.values())) <= MAX_LONG_SIGNATURES, found


def test_a_long_signature_is_noticed() -> None:
    function = "f(" + ", ".join(f"a{i}" for i in range(MAX_PARAMETERS + 1)) + "): ..."
    assert long_signatures(f"@triton.jit\ndef {function}") == ["f (line 2): 10 parameters"]
    assert not long_signatures(f"@triton.jit\ndef mxquant_{function}")


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert not long_functions(source)


def test_a_long_function_is_noticed() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert long_functions("def short():\n    pass\n\n\ndef long():\n" + body) == ["long (line 5): 61 lines"]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_names_say_what_a_file_holds(path: Path) -> None:
    assert not VAGUE_NAMES & {*path.relative_to(ROOT).with_suffix("").parts}


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level modules that `statement` loads in a fresh process beyond those that torch and torchao load."""
    script = (
        "import sys, torch, torchao, torchao.quantization\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by("import mxquant")
    assert "mxquant" in loaded
    assert not loaded & HEAVY


def test_a_heavy_import_is_noticed() -> None:
    assert "safetensors" in modules_loaded_by("import safetensors")


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
