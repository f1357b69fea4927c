"""What the rewriter raises."""


class RewriteError(RuntimeError):
    """A local program does not fit the layouts it was made from: a fault of this compiler, not of its user."""
