"""Errors of ops. (On NotImplementedError, `choose` tries the next implementation instead.)"""


class MissingLibrary(ImportError):
    """A library that the kernels for this device need is not installed; no other implementation
    replaces them.
    """
