"""The one family of errors a user meets: what was wrong, what was got, what was expected, what to do."""

from __future__ import annotations


class MoEError(ValueError):
    """Base of every error this package raises on purpose."""


class CheckpointError(MoEError):
    """A checkpoint on disk is incomplete, damaged, inconsistent or of an unsupported kind."""


class UnsupportedISAError(MoEError):
    """A CPU level was demanded that is unknown or that this CPU cannot execute."""


class ModuleError(MoEError):
    """A kernel module or packed file is missing, damaged, foreign or unsafe to load."""


class SlowPathWarning(UserWarning):
    """Something works, but slower than it could; said once per process and listed by ``explain()``."""


class EmulationError(MoEError):
    """AArch64 programs cannot be run on this machine; the message says what is missing."""
