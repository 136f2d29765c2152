"""Checkpoints of this and other producers: read and written tensor by tensor, one file a producer."""

from mxquant.checkpoints.known_producers import PRODUCERS, get_producer, writable_producers
from mxquant.checkpoints.load import Content, load_state, read_content
from mxquant.checkpoints.save import save_state

__all__ = ["PRODUCERS", "Content", "get_producer", "load_state", "read_content", "save_state", "writable_producers"]
