"""What can go wrong between a checkpoint folder and a token.

EngineError
├── CheckpointError          the folder cannot be served; names the file, what was found and allowed
│   ├── CheckpointMissing        a file or a tensor is not there
│   ├── CheckpointCorrupt        a file is there but cannot be read
│   └── CheckpointMismatch       a tensor's shape or type contradicts config.json
├── UnsupportedModel         config.json asks for something that is not implemented
├── InvalidLogits            the model computes logits from which no token can be drawn
├── NotEnoughMemory          the device cannot hold the weights and one page
└── EngineClosed             a call after close()
"""


class EngineError(Exception):
    """Base of all errors of this package."""


class CheckpointError(EngineError):
    """The checkpoint folder cannot be served."""


class CheckpointMissing(CheckpointError):
    """A file or a tensor is not there."""


class CheckpointCorrupt(CheckpointError):
    """A file is there but cannot be read."""


class CheckpointMismatch(CheckpointError):
    """A tensor's shape or type contradicts config.json."""


class UnsupportedModel(EngineError):
    """config.json asks for something that is not implemented."""


class InvalidLogits(EngineError):
    """The model computes logits from which no token can be drawn: NaN, inf, or only -inf."""


class NotEnoughMemory(EngineError):
    """The device cannot hold the weights and one page."""


class EngineClosed(EngineError):
    """A call after close()."""
