"""The documentation is true: its snippets run and print what they say, its links lead somewhere, its table is current.

The Python blocks of a page run from top to bottom in one namespace, as a reader would type them. A `text` block right
after a Python block is what that block prints.
"""

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import mxquant
from mxquant.backends import Problem, unregister_backend
from mxquant.backends.emulation import Emulation

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in FENCE.finditer(text)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run_page(page: Path) -> int:
    """Run the Python blocks of a page, compare what they print where the page says it, and count them."""
    blocks = blocks_of(page)
    namespace: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for index, block in enumerate(blocks):
        if block.language != "python":
            continue
        # The line numbers of a traceback are those of the page.
        code = compile("\n" * (block.line - 1) + block.text, name_of(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        ran += 1
        for expected in blocks[index + 1 : index + 2]:
            if expected.language == "text":
                assert lines_of(printed.getvalue()) == lines_of(expected.text), f"{name_of(page)}, line {expected.line}"
    return ran


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
@pytest.mark.usefixtures("registry_restored")
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "peft"):
        if re.search(rf"^(from|import) {package}\b", page.read_text(), re.MULTILINE):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    expected = sum(block.language == "python" for block in blocks_of(page))
    backends = mxquant.list_backends()
    assert run_page(page) == expected
    assert mxquant.list_backends() == backends


def test_a_wrong_output_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md, line 6"):
        run_page(page)


def test_pages_have_snippets() -> None:
    assert sum(block.language == "python" for page in PAGES for block in blocks_of(page)) >= 10


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_named_files_exist(page: Path) -> None:
    """Every path in backticks, but those with a placeholder such as `<name>`."""
    named = re.findall(r"`((?:mxquant|tests|docs|benchmarks|examples)/[\w./]*)`", page.read_text())
    assert len(named) >= 10
    assert not [path for path in named if not (ROOT / path).exists()]


def test_public_names_are_documented() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    names = [name for name in mxquant.__all__ if not name.startswith("__")]
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


def test_support_matrix_is_what_the_backends_answer(tmp_path: Path) -> None:
    """The backends of the checkout that the generator lies in, whatever mxquant is found first elsewhere."""
    (tmp_path / "mxquant.py").write_text("raise AssertionError('another mxquant')")
    command = [sys.executable, str(ROOT / "docs" / "generate_support_matrix.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_backend_changes_the_support_matrix() -> None:
    """The table is asked of the backends: one that takes a single problem shows, with where it takes it."""
    namespace = runpy.run_path(str(ROOT / "docs" / "generate_support_matrix.py"))
    before = namespace["page"]()

    class Narrow(Emulation):
        name = "narrow"
        native = True

        def reject(self, problem: Problem) -> str | None:
            taken = problem.capability == (9, 0) and problem.dtype == torch.float16
            return None if taken and problem.weight == problem.activation == "mxfp4" else "takes one problem only"

    mxquant.register_backend(Narrow)
    try:
        added = set(namespace["page"]().splitlines()) - set(before.splitlines())
    finally:
        unregister_backend("narrow")
    (row,) = [line for line in added if line.startswith("| `mxfp4` | `mxfp4` |")]
    assert "`narrow` (cuda 9.0: float16), `emulation` |" in row


def test_ci_runs_the_commands_of_the_readme() -> None:
    """Each command of README's shell blocks stands in `.ci/run`, so that CI does what a reader would do."""
    script = (ROOT / ".ci" / "run").read_text()
    blocks = [block.text for block in blocks_of(ROOT / "README.md") if block.language == "bash"]
    lines = [line.split("#")[0] for text in blocks for line in text.splitlines()]
    commands = [command.strip() for line in lines for command in line.split("&&")]
    missing = [command for command in commands if command and not stands_in(command, script)]
    assert len(commands) >= 4
    assert not missing


def stands_in(command: str, script: str) -> bool:
    words = shlex.split(command)
    if words[:2] == ["pip", "install"] and words[2].startswith("torch"):
        return f"TORCH_SPEC:-{words[2]}" in script
    return command.replace("pip install", "pip install --quiet") in script or command in script
