"""Reads the expert layers of Hugging Face safetensors checkpoints, expert by expert.

``open(path).layer(i).experts()`` yields the weights of one layer; `formats.FORMATS` lists what can be read.
"""

from ..experts import ExpertWeights
from .formats import FORMATS
from .layer import LayerReader
from .reader import Checkpoint
from .reader import open_checkpoint as open

__all__ = ["FORMATS", "Checkpoint", "ExpertWeights", "LayerReader", "open"]
