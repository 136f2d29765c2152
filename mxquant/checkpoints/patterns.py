"""Regular expressions of a checkpoint's config, which may be hostile: matching them ends soon, or they are refused.

Python's `re` backtracks, so that "(.*.*)*!" takes a time exponential in the length of a name, and cannot be stopped.
Most patterns cannot do that and are matched at once. A suspicious one is first tried on ever longer beginnings of the
name: one character more multiplies the time by a small number, so that the first slow one is seen while it is cheap.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

# Python's own parser of regular expressions, which 3.11 moved.
sre: Any = importlib.import_module("re._constants" if sys.version_info >= (3, 11) else "sre_constants")
sre_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

_LONG_NAME = 300
_FEW_REPEATS = 3
_CPU_SECONDS = 0.1
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
_LOOKAROUNDS = (sre.ASSERT, sre.ASSERT_NOT, sre.GROUPREF, sre.GROUPREF_EXISTS)


def matches_start(pattern: str, name: str) -> bool:
    """Whether the regular expression matches from the start of `name`.

    Raises:
        ValueError: it is no regular expression, or matching takes too long.
    """
    return _compiled(pattern).matches(name)


class _Pattern:
    def __init__(self, pattern: str) -> None:
        try:
            self._regex = re.compile(pattern)
            nodes = list(_nodes(sre_parser.parse(pattern), in_repeat=False))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} in the checkpoint's config is no regular expression: {error}") from None
        self._repeats = sum(op in _REPEATS for op, _ in nodes)
        self._is_nested = any(in_repeat and op in (*_REPEATS, sre.BRANCH) for op, in_repeat in nodes)
        jumps = any(op in _LOOKAROUNDS for op, _ in nodes)
        if jumps and (self._is_nested or self._repeats > 2 * _FEW_REPEATS):
            raise ValueError(self._refusal("has lookaround or references and nested or many repeats"))
        self._seconds = 0.0
        self._tried: set[str] = set()

    def matches(self, name: str) -> bool:
        is_long = len(name) > _LONG_NAME and self._repeats > 1
        if self._is_nested or self._repeats > _FEW_REPEATS or is_long:
            self._try_beginnings(name)
        return self._regex.match(name) is not None

    def _try_beginnings(self, name: str) -> None:
        """Refuse the pattern if it is slow on the name. Names that differ in digits alone are tried once."""
        form = re.sub(r"\d+", "0", name)
        if form in self._tried:
            return
        self._tried.add(form)
        for length in range(len(name) + 1):
            start = time.thread_time()
            self._regex.match(name[:length])
            self._seconds += time.thread_time() - start
            if self._seconds > _CPU_SECONDS:
                raise ValueError(self._refusal(f"takes too long on names such as {name[:80]!r}"))

    def _refusal(self, why: str) -> str:
        return (
            f"the regular expression {self._regex.pattern[:80]!r} in the checkpoint's config {why}: matching could "
            "take forever. Write it without nested repeats such as (.*.*)*"
        )


_compiled = functools.lru_cache(maxsize=1024)(_Pattern)


def _nodes(parsed: Any, in_repeat: bool) -> Iterator[tuple[Any, bool]]:
    """The operators of a parsed pattern, each with whether it stands in a repeat of many times.

    A repeat counts that may run more than once, or a variable number of times.
    """
    for op, argument in parsed:
        if op in _REPEATS:
            low, high, body = argument
            is_many = high > 1
            if is_many and low != high:
                yield op, in_repeat
            yield from _nodes(body, in_repeat or is_many)
            continue
        yield op, in_repeat
        for part in argument if isinstance(argument, (tuple, list)) else [argument]:
            for one in part if isinstance(part, list) else [part]:
                if isinstance(one, sre_parser.SubPattern):
                    yield from _nodes(one, in_repeat)
