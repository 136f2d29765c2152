"""The shape of the package: imports go one way, importing it is cheap, and no file or function outgrows its purpose."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mxquant"

# What each part of the package may import beside itself. `formats <- reference <- kernels <- ops <- backends <- tensor
# <- modules <- algorithms <- api`; `scheme` and `config` are leaves that all but the lowest layers may read.
BELOW_TENSOR = {"formats", "reference", "kernels", "ops", "scheme", "backends"}
BELOW_MODULES = BELOW_TENSOR | {"tensor", "config"}
BELOW_ALGORITHMS = BELOW_MODULES | {"modules", "select"}
BELOW_API = BELOW_ALGORITHMS | {"algorithms", "report", "validate"}
ALLOWED = {
    "formats": set(),
    "scheme": {"formats"},
    "config": {"formats", "scheme"},
    "reference": {"formats"},
    "kernels": {"formats", "reference"},
    "ops": {"formats", "reference", "kernels"},
    "backends": {"formats", "reference", "kernels", "ops", "scheme"},
    "tensor": BELOW_TENSOR,
    "modules": BELOW_MODULES,
    "select": BELOW_MODULES | {"modules"},
    "validate": BELOW_ALGORITHMS,
    "algorithms": BELOW_ALGORITHMS,
    "report": {"formats", "scheme", "tensor"},
    "explanation": BELOW_MODULES | {"report"},
    "tuning": BELOW_MODULES | {"report"},
    "checkpoints": {"formats", "scheme", "backends", "tensor"},
    "api": BELOW_API,
    "integrations": BELOW_API | {"api", "checkpoints"},
    "__init__": BELOW_API | {"api", "explanation", "tuning", "checkpoints", "integrations"},
    "cli": BELOW_API | {"explanation", "checkpoints", "integrations"},
    "__main__": {"cli"},
}

# Loaded on demand only. torch and torchao load some of these themselves; what counts is what mxquant adds.
HEAVY = {"triton", "transformers", "accelerate", "rich", "tqdm", "matplotlib", "numpy", "pandas", "safetensors"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = MODULES + sorted(
    path for folder in ("tests", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: its folder in the package, or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and part of each import of the package, wherever it stands: a late import counts like one at the top."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "ruff allows no relative import"
            names = [node.module or ""]
            if node.module == "mxquant":
                names = [f"mxquant.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "mxquant":
                yield node.lineno, rest[0] if rest else "__init__"


def misdirected_imports(source: str, part: str) -> list[str]:
    return [
        f"line {line}: {part} imports {imported}"
        for line, imported in imported_parts(ast.parse(source))
        if imported != part and imported not in ALLOWED[part]
    ]


def long_functions(source: str) -> list[str]:
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {f"{node.name} (line {node.lineno})": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > MAX_FUNCTION_LINES]


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{relative(path)}: say in ALLOWED what the new part {part!r} may import"
    assert not misdirected_imports(path.read_text(), part)


@pytest.mark.parametrize(
    "source",
    [
        "import mxquant.api",
        "from mxquant.tensor import MXTensor",
        "from mxquant import api",
        "import mxquant",
        "def late():\n    from mxquant.backends.registry import select",
    ],
)
def test_a_wrong_import_is_noticed(source: str) -> None:
    assert misdirected_imports(source, "formats")


def test_config_imports_only_formats_and_scheme() -> None:
    """A config is made before anything is quantized, and by code that has no tensor."""
    tree = ast.parse((PACKAGE / "config.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {module for module in modules if module.startswith("mxquant")} <= {"mxquant.formats.spec", "mxquant.scheme"}


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
