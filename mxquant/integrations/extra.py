"""The extra `transformers`, without which a part of mxquant works: who needs it says how to install it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needing_transformers() -> Iterator[None]:
    """Around imports of transformers and of modules that import it.

    Raises:
        ImportError: it is not installed, or too old.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"transformers 5.17 or newer is needed ({error}); install it with pip install 'mxquant[transformers]', in "
            "a checkout pip install '.[transformers]'",
            name=error.name,
        ) from error
