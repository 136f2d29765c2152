"""Checkpoints of this and other producers: reading, writing, recognizing, and what is wrong with damaged ones."""
