"""Okazaki: a DeepSpeed launcher for training DNA language models.

A step is its global batch; everything else says only how it is cut.
"""

__version__ = "0.1.0"
