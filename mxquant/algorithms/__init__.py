"""What finds better codes than rounding to nearest: calibration, and GPTQ."""
