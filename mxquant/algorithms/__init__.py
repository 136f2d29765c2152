"""GPTQ calibration, and sensitivity analysis for mixed precision."""

from mxquant.algorithms.sensitivity import LayerSensitivity, Sensitivity, sensitivity

__all__ = ["LayerSensitivity", "Sensitivity", "sensitivity"]
