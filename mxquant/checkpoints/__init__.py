"""Checkpoints of this and other producers: read and written tensor by tensor, one file a producer."""

from mxquant.checkpoints.load import Content, load_state, read_content
from mxquant.checkpoints.registry import PRODUCERS, get_producer

__all__ = ["PRODUCERS", "Content", "get_producer", "load_state", "read_content"]
