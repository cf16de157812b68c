"""Where drafted tokens come from. A drafter proposes; the target alone decides."""

from .protocol import Drafter, Proposer

__all__ = ["Drafter", "Proposer"]
