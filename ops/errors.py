"""What ops raise beside NotImplementedError, which means that another implementation serves."""


class MissingLibrary(ImportError):
    """A library that the kernels for this device need is not installed; no other implementation
    replaces them.
    """
