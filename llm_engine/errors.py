"""Failures between a checkpoint and a token.

EngineError
├── CheckpointError          the files cannot be served; names file, what was found and allowed
│   ├── CheckpointMissing        a file or a tensor is missing
│   ├── CheckpointCorrupt        a file exists but cannot be read
│   └── CheckpointMismatch       a tensor's shape or type contradicts the configuration
├── UnsupportedModel         the model requires something that is not implemented
├── CacheUnusable            the user's cache cannot be written
├── InvalidLogits            the model computes logits from which no token can be drawn
└── NotEnoughMemory          the device cannot hold the weights and one page
"""


class EngineError(Exception):
    """Base of all errors of this package."""


class CheckpointError(EngineError):
    """The checkpoint folder cannot be served."""


class CheckpointMissing(CheckpointError):
    """A file or a tensor is missing."""


class CheckpointCorrupt(CheckpointError):
    """A file exists but cannot be read."""


class CheckpointMismatch(CheckpointError):
    """A tensor's shape or type contradicts config.json."""


class UnsupportedModel(EngineError):
    """The model requires something that is not implemented."""


class CacheUnusable(EngineError):
    """The user's cache folder cannot be written."""


class InvalidLogits(EngineError):
    """The model computes logits from which no token can be drawn: NaN, inf, or only -inf."""


class NotEnoughMemory(EngineError):
    """The device cannot hold the weights and one page."""
