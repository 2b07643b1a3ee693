"""Constants of built-in models and optimizers that plans do not contain. Needs no OneFlow: exported files have them as literals."""

from __future__ import annotations

__all__ = ["LAYER_NORM_EPS", "LEARNING_RATES", "POOLING", "RMS_NORM_EPS", "ROTARY_BASE"]

#: Constant that layer norms add to the variance.
LAYER_NORM_EPS = 1e-5
#: Constant that RMS norms add to the mean square.
RMS_NORM_EPS = 1e-6
#: Base of the frequencies of rotary positions.
ROTARY_BASE = 10000.0
#: Arguments of VGG's max poolings.
POOLING = {"kernel_size": 2, "stride": 2}
#: Learning rate of each optimizer that plans name, where the user gives none.
LEARNING_RATES = {"adam": 1e-3, "momentum": 1e-2, "sgd": 1e-2}
