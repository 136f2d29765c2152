"""The optional dependency on transformers: code that needs it says how to install it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needing_transformers() -> Iterator[None]:
    """A context for imports of transformers and of modules that import it. An ImportError says what to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"transformers 5.17 or newer is needed ({error}); install it with pip install 'mxquant[transformers]', in "
            "a checkout pip install '.[transformers]'",
            name=error.name,
        ) from error
