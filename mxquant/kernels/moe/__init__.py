"""The operations around the matmuls of an expert block: routing, gated activation, combining."""
