"""Who proposes tokens, and how the target decides on them. Token ids and distributions; nothing of text."""

from mlx_spec.speculation.draft_model import DraftModel, Proposal
from mlx_spec.speculation.verify import verify_tokenwise

__all__ = ["DraftModel", "Proposal", "verify_tokenwise"]
