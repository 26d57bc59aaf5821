"""What can go wrong, as one family. Each message names the offending value, what is accepted, and the next step."""


class MLXSpecError(Exception):
    """Base of every error mlx-spec raises on purpose. The command line prints its message as one line."""


class ModelNotFound(MLXSpecError):
    """A model, draft or file that is not there, is incomplete, or cannot be downloaded."""


class IncompatiblePair(MLXSpecError):
    """A draft whose tokenizer gives other ids than the target's for the same strings."""


class DoesNotFit(MLXSpecError):
    """A request for more memory than the machine, or the pool, has."""


class BadConfig(MLXSpecError):
    """A value out of range, a broken file, or an architecture that is not known."""

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        """setting: the field of a configuration that `message` begins with, if it does."""
        super().__init__(message)
        self.setting = setting


def shortened(text: str) -> str:
    """`text` as a message shows it: cut where nobody would read on."""
    return text if len(text) <= 100 else f"{text[:100]}..."
