"""What finds better codes than rounding to nearest, and better formats than one for all: GPTQ, and sensitivity."""

from mxquant.algorithms.sensitivity import LayerSensitivity, Sensitivity, sensitivity

__all__ = ["LayerSensitivity", "Sensitivity", "sensitivity"]
