"""Who proposes tokens, how many, and how the target decides on them. Token ids and distributions; nothing of text."""

from mlx_spec.speculation.draft_model import DraftModel, Proposal
from mlx_spec.speculation.drafting import Drafting, Plan
from mlx_spec.speculation.lookup import Lookup
from mlx_spec.speculation.schedule import AutoSchedule, Drafter, FixedSchedule, Schedule
from mlx_spec.speculation.verify import verify_block, verify_tokenwise

__all__ = [
    "AutoSchedule",
    "DraftModel",
    "Drafter",
    "Drafting",
    "FixedSchedule",
    "Lookup",
    "Plan",
    "Proposal",
    "Schedule",
    "verify_block",
    "verify_tokenwise",
]
