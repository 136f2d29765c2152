"""What stands around the matmuls of an expert block: routing, gated activation, combining."""
