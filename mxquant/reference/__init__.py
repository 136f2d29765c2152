"""The torch twin of each kernel: the same bits on any device. Pure torch."""
