"""What is quantized inside a module."""
