"""The torch twin of each kernel: what it computes, bit by bit, on any device. Pure torch."""
